# SPDX-License-Identifier: Apache-2.0
"""Appends to quantized pages, and plots."""
