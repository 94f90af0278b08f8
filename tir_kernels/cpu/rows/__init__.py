# SPDX-License-Identifier: Apache-2.0
"""Attention of single query rows: blocks of positions, products, and the schedule of pages."""
