# SPDX-License-Identifier: Apache-2.0
"""Rows that blocks copy, rotate, quantize and blend: the components of `moves`."""
