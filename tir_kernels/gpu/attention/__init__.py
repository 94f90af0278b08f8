# SPDX-License-Identifier: Apache-2.0
"""Attention kernels for GPUs."""
