# SPDX-License-Identifier: Apache-2.0
"""Kernels that work row by row: norms, gates, routing, rotations."""
