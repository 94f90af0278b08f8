# SPDX-License-Identifier: Apache-2.0
"""Tiles in shared memory and registers: layouts, copies, products, softmax."""
