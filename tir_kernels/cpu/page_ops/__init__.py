# SPDX-License-Identifier: Apache-2.0
"""Kernels over pages that the caller owns, and arithmetic on page tables."""
