# SPDX-License-Identifier: Apache-2.0
"""Products of rows with packed weights of bfloat16 in the tiles of AMX.

The packed weights are tiles as they are: 16 rows of a block by 16 of its output features.
"""

from __future__ import annotations

from collections.abc import Callable

from tvm.script import tirx as T

from tir_kernels.cpu.isa.bf16 import INT32
from tir_kernels.cpu.isa.matrices.amx import SIDE
from tir_kernels.cpu.isa.matrices.tile_pairs import TilePairs
from tir_kernels.cpu.isa.simd import broadcast, chunks, store, temp

from ..packed_layout import PackedMatrix
from ..packed_products import PackedProducts
from .tile_tasks import TileTasks


class TileProducts(TileTasks, PackedProducts):
    """`PackedProducts` that multiply many rows in tiles.

    Parameters
    ----------
    matrix : PackedMatrix
        It has tiles.
    """

    matrix: PackedMatrix
    ops: TilePairs

    def __init__(self, matrix: PackedMatrix):
        super().__init__(matrix)
        self.ops = TilePairs()
        self.num_steps = matrix.depth // SIDE

    def _copy_rows(self, rows, count, row_of: Callable) -> None:
        whole, rest = divmod(self.depth, SIDE)
        with T.serial(count) as row:
            source = temp(row_of(row), 1, "int64")
            with T.serial(T.int64(whole)) as step:
                pairs = self.ops.pairs(self.x, (source, step * SIDE), SIDE)
                store(rows, (step, row, 0), SIDE, pairs, INT32)
            if rest:
                store(rows, (whole, row, 0), SIDE, broadcast(T.int32(0), SIDE), INT32)
                for start, lanes in chunks(rest, SIDE):
                    pairs = self.ops.pairs(self.x, (source, whole * SIDE + start), lanes)
                    store(rows, (whole, row, start), lanes, pairs, INT32)

    def _tiles_of(self, block, first, length) -> Callable:
        numbers, width = self.matrix.numbers, self.matrix.width
        return lambda step, column: (self.weight, (block, step * SIDE, column * numbers), width)
