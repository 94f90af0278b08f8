# SPDX-License-Identifier: Apache-2.0
"""The products that suit a matrix and the CPU that it is packed for."""

from __future__ import annotations

from .amx.tile_code_sums import TileCodeSums
from .amx.tile_products import TileProducts
from .code_matrix import CodeMatrix
from .code_sums import CodeSums
from .packed_layout import PackedMatrix
from .packed_products import PackedProducts


def products_for(matrix: PackedMatrix | CodeMatrix, dtype: str) -> PackedProducts | CodeSums:
    """Return what multiplies rows of type `dtype` with blocks of a matrix, task by task.

    With AMX these are products in tiles; no linear layer asks for them by name.
    """
    if isinstance(matrix, PackedMatrix):
        return TileProducts(matrix) if matrix.has_tiles else PackedProducts(matrix)
    in_tiles = dtype == "bfloat16" and matrix.target.has_amx and matrix.multiplies_bytes
    return TileCodeSums(matrix) if in_tiles else CodeSums(matrix)
