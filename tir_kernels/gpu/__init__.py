# SPDX-License-Identifier: Apache-2.0
"""Kernels for GPUs, without the instructions of any: those are a target's, see `cuda`."""
