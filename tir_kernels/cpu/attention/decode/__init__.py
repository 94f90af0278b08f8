# SPDX-License-Identifier: Apache-2.0
"""Decode: one query row per sequence, bound by reading K and V once."""
