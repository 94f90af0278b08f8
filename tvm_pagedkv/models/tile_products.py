# SPDX-License-Identifier: Apache-2.0
"""Products of many rows of activations with packed weights of bfloat16, in the tiles of AMX.

A task copies its rows step by step, a step being the 32 input features of one product of tiles, so
that a tile of rows lies in one piece and the last step can have zeros. It multiplies the copy with
several blocks of weights, which are tiles as they are packed. For each block::

    for part in parts of DEPTH input features:
        for 32 rows:                            # a part of them stays in the L1 cache
            for 32 output features:
                sums of 2 x 2 tiles = 0, or those of the part before
                for step in part:
                    load 2 tiles of rows and 2 of weights, add 4 products
                store the sums
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from tvm.script import tirx as T

from tir_kernels.cpu.amx import SIDE
from tir_kernels.cpu.bf16 import INT32
from tir_kernels.cpu.components.amx_tile import AmxTile, NarrowAmxTile
from tir_kernels.cpu.components.tile_pairs import TilePairs
from tir_kernels.cpu.simd import F32, broadcast, chunks, store, temp

from .packed_layout import PackedMatrix
from .packed_products import DEPTH, UNIT_ROWS, PackedProducts

# Rows from which on tiles of 16 rows are used. A few rows wait for weights in any case.
MIN_TILE_ROWS = 8
# Blocks that a task multiplies with its copy of the rows, so that copying takes a small part of
# the time and the rows come from the L3 cache once for 256 output features.
BLOCKS_PER_TASK = 4
_PART_STEPS = DEPTH // (2 * SIDE)


class TileProducts(PackedProducts):
    """`PackedProducts` that multiply `MIN_TILE_ROWS` or more rows in tiles.

    Parameters
    ----------
    matrix : PackedMatrix
        It has tiles.
    """

    ops: TilePairs

    def __init__(self, matrix: PackedMatrix):
        super().__init__(matrix)
        self.ops = TilePairs()
        self.num_steps = matrix.depth // SIDE

    def blocks_per_task(self, row_units):
        """Return how many blocks one task multiplies: no more than leave a task for each block."""
        return temp(T.min(row_units, T.int64(BLOCKS_PER_TASK)), 1, "int64")

    @contextmanager
    def unit(self, count, row_of: Callable) -> Iterator[Callable]:
        """Copy the rows and configure the tiles, and release them after all products."""
        in_tiles = count >= T.int64(MIN_TILE_ROWS)
        rows = T.alloc_buffer((self.num_steps, UNIT_ROWS, SIDE), INT32)
        with T.If(in_tiles), T.Then():
            self._copy_rows(rows, count, row_of)
            self.ops.begin_task()

        def sums(block):
            buffer = T.alloc_buffer((UNIT_ROWS, self.matrix.width), F32)
            with T.If(in_tiles):
                with T.Then():
                    self._add_tiles(buffer, rows, block, count)
                with T.Else():
                    self._add_vectors(buffer, block, count, row_of)
            return buffer

        yield sums
        with T.If(in_tiles), T.Then():
            self.ops.end_task()

    def _copy_rows(self, rows, count, row_of: Callable) -> None:
        """Copy rows of x to ``rows[step, row]``; what the last step lacks becomes zeros."""
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

    def _add_tiles(self, sums, rows, block, count) -> None:
        """Emit the products of the copied rows with a block."""
        num_tiles = temp((count + SIDE - 1) // SIDE, 1, "int64")
        num_parts = -(-self.num_steps // _PART_STEPS)
        with T.serial(T.int64(num_parts)) as part:
            first = temp(part * _PART_STEPS, 1, "int64")
            length = temp(T.min(self.num_steps - first, T.int64(_PART_STEPS)), 1, "int64")
            steps = (first, length)
            with T.serial(num_tiles // 2) as i:
                wide = AmxTile(self.ops, 2 * SIDE, 2, SIDE)
                self._add_part(wide, sums, rows, temp(i * 2 * SIDE, 1, "int64"), block, steps)
            with T.If(num_tiles % 2 == T.int64(1)), T.Then():
                narrow = NarrowAmxTile(self.ops, SIDE, 2, SIDE)
                row = temp((num_tiles - 1) * SIDE, 1, "int64")
                self._add_part(narrow, sums, rows, row, block, steps)

    def _add_part(self, tile: AmxTile, sums, rows, row, block, steps) -> None:
        """Add the products of a tile of rows with a block over some steps to their sums."""
        first, length = steps
        for column in range(0, self.matrix.width, tile.width):
            with T.If(first == T.int64(0)):
                with T.Then():
                    tile.clear()
                with T.Else():
                    tile.load(sums, row, column)
            with T.serial(length) as i:
                step = temp(first + i, 1, "int64")

                def weights(j: int, step=step, column=column) -> tuple:
                    at = (block, step * SIDE, (column + j * SIDE) * 2)
                    return self.weight, at, self.matrix.width

                tile.add_step(lambda i, step=step: (rows, (step, row + i * SIDE, 0), SIDE), weights)
            tile.put(sums, row, column)
