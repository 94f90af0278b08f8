# SPDX-License-Identifier: Apache-2.0
"""Tiles in shared memory: their sizes and layouts, the copies of K and V, rotations."""
