# SPDX-License-Identifier: Apache-2.0
"""Kernels for GPUs of compute capability 8.0 and up."""
