# SPDX-License-Identifier: Apache-2.0
"""Attention to chosen positions: lists, blocks, bounds of pages and index keys."""
