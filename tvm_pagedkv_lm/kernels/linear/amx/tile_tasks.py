# SPDX-License-Identifier: Apache-2.0
"""Products of many rows of activations with blocks of weights, in the tiles of AMX.

A task copies its rows step by step, a step being the 32 input features of one product of tiles, so
that a tile of rows lies in one piece and the last step can have zeros. It multiplies the copy with
several blocks of weights. For each block::

    for part in parts of DEPTH input features:
        weights of the part as tiles
        for 32 rows:                            # a part of them stays in the L1 cache
            for 32 output features:
                sums of 2 x 2 tiles = 0, or those of the part before
                for step in part:
                    load 2 tiles of rows and 2 of weights, add 4 products
                store the sums
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from tvm.script import tirx as T

from tir_kernels.cpu.isa.bf16 import INT32
from tir_kernels.cpu.isa.matrices.amx import SIDE
from tir_kernels.cpu.isa.matrices.amx_tile import AmxTile, NarrowAmxTile
from tir_kernels.cpu.isa.matrices.tile_pairs import TilePairs
from tir_kernels.cpu.isa.simd import F32, temp

from ..output_blocks import OutputBlocks
from ..packed_products import DEPTH, TASK_ROWS

# Rows from which on tiles of 16 rows are used. A few rows wait for weights in any case.
MIN_TILE_ROWS = 8
# Blocks that a task multiplies with its copy of the rows, so that copying takes a small part of
# the time and the rows come from the L3 cache once for 256 output features.
BLOCKS_PER_TASK = 4
PART_STEPS = DEPTH // (2 * SIDE)


class TileTasks(ABC):
    """Rows of a task, of which `MIN_TILE_ROWS` or more are multiplied in tiles.

    Attributes
    ----------
    matrix : OutputBlocks
        The packed weights.
    num_steps : int
        Steps of a product of tiles, each of 32 input features.
    _add_vectors : callable
        What multiplies fewer rows: a method of the other base of a subclass.
    """

    matrix: OutputBlocks
    num_steps: int
    ops: TilePairs
    _add_vectors: Callable

    @abstractmethod
    def _copy_rows(self, rows, count, row_of: Callable) -> None:
        """Copy rows of x to ``rows[step, row]``, pairs with zeros behind the last input feature."""

    @abstractmethod
    def _tiles_of(self, block, first, length) -> Callable:
        """Prepare the weights of some steps of a block.

        Returns
        -------
        callable
            ``(step, column)`` returns where the tile of a step begins whose first output feature is
            `column` of the block: as `AmxTile.add_step` takes it.
        """

    takes_many_blocks = True

    def blocks_per_task(self, row_tasks):
        """Return how many blocks a task multiplies: no more than there are tasks of rows."""
        # Without rows there are no tasks, but the number of groups is divided by this.
        limit = T.min(row_tasks, T.int64(BLOCKS_PER_TASK))
        return temp(T.max(limit, T.int64(1)), 1, "int64")

    @contextmanager
    def task(self, count, row_of: Callable) -> Iterator[Callable]:
        """Copy the rows and configure the tiles; release them after all products.

        Parameters and what is yielded are those of `PackedProducts.task`.
        """
        in_tiles = count >= T.int64(MIN_TILE_ROWS)
        rows = T.alloc_buffer((self.num_steps, TASK_ROWS, SIDE), INT32)
        with T.If(in_tiles), T.Then():
            self._copy_rows(rows, count, row_of)
            self.ops.begin_task()

        def sums(block):
            buffer = T.alloc_buffer((TASK_ROWS, self.matrix.width), F32)
            with T.If(in_tiles):
                with T.Then():
                    self._add_tiles(buffer, rows, block, count)
                with T.Else():
                    self._add_vectors(buffer, block, count, row_of)
            return buffer

        yield sums
        with T.If(in_tiles), T.Then():
            self.ops.end_task()

    def _add_tiles(self, sums, rows, block, count) -> None:
        """Emit the products of the copied rows with a block."""
        num_tiles = temp((count + SIDE - 1) // SIDE, 1, "int64")
        num_parts = -(-self.num_steps // PART_STEPS)
        with T.serial(T.int64(num_parts)) as part:
            first = temp(part * PART_STEPS, 1, "int64")
            length = temp(T.min(self.num_steps - first, T.int64(PART_STEPS)), 1, "int64")
            operands = (rows, self._tiles_of(block, first, length))
            with T.serial(num_tiles // 2) as i:
                wide = AmxTile(self.ops, 2 * SIDE, 2, SIDE)
                row = temp(i * 2 * SIDE, 1, "int64")
                self._add_part(wide, sums, row, operands, (first, length))
            with T.If(num_tiles % 2 == T.int64(1)), T.Then():
                narrow = NarrowAmxTile(self.ops, SIDE, 2, SIDE)
                row = temp((num_tiles - 1) * SIDE, 1, "int64")
                self._add_part(narrow, sums, row, operands, (first, length))

    def _add_part(self, tile: AmxTile, sums, row, operands: tuple, steps: tuple) -> None:
        """Add the products of a tile of rows with a block over some steps to their sums."""
        (rows, tile_at), (first, length) = operands, steps
        for column in range(0, self.matrix.width, tile.width):
            with T.If(first == T.int64(0)):
                with T.Then():
                    tile.clear()
                with T.Else():
                    tile.load(sums, row, column)
            with T.serial(length) as i:
                step = temp(first + i, 1, "int64")
                tile.add_step(
                    lambda i, step=step: (rows, (step, row + i * SIDE, 0), SIDE),
                    lambda j, step=step, column=column: tile_at(step, column + j * SIDE),
                )
            tile.put(sums, row, column)
