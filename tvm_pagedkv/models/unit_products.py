# SPDX-License-Identifier: Apache-2.0
"""The products that suit a matrix and the CPU that it is packed for."""

from __future__ import annotations

from .code_matrix import CodeMatrix
from .code_sums import CodeSums
from .packed_layout import PackedMatrix
from .packed_products import PackedProducts
from .tile_products import TileProducts


def unit_products(matrix: PackedMatrix | CodeMatrix) -> PackedProducts | CodeSums:
    """Return what emits the products of a unit of rows with blocks of a matrix."""
    if isinstance(matrix, CodeMatrix):
        return CodeSums(matrix)
    return TileProducts(matrix) if matrix.has_tiles else PackedProducts(matrix)
