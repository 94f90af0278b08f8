# SPDX-License-Identifier: Apache-2.0
"""Texts, needles and drifts that tell what quantized pages cost in quality."""
