# SPDX-License-Identifier: Apache-2.0
"""RoPE and Hadamard rotations inside attention kernels."""
