# SPDX-License-Identifier: Apache-2.0
"""Kernels for CPUs: SIMD fragments, tasks, and attention built from them."""
