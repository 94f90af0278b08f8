# SPDX-License-Identifier: Apache-2.0
"""The product of matrices in the tile registers of AMX, with the methods of `RegisterTile`."""

from collections.abc import Callable

from tvm.script import tirx as T

from ....script import inline
from ....spec import VectorTarget
from ..simd import F32, broadcast, load, store
from .amx import A_TILES, B_TILES, SIDE, Tiles
from .register_tile import UNROLL


@T.meta_class
class AmxTile:
    """Sums of products of pairs of bfloat16, in two rows of tiles by one or two columns.

    As of `RegisterTile`, but rows of A and B have to lie in one buffer each, at least `step`
    elements of them, and B is read to the end of its last 16 columns. Sums of columns behind the
    last one mean nothing, and `put` stores them: the matrix has whole tiles of columns.

    Parameters
    ----------
    ops : operands object
    rows : int
        16 or 32.
    vectors, lanes : int
        One or two vectors of 16 columns, or one of the first 8.
    """

    step = SIDE
    column_step = SIDE

    @staticmethod
    def shape(target: VectorTarget) -> tuple[int, int]:
        """Rows and vectors of a wide tile."""
        return 2 * SIDE, 2

    def __init__(self, ops, rows: int, vectors: int, lanes: int):
        assert rows % SIDE == 0 and rows <= 2 * SIDE and vectors * lanes <= 2 * SIDE
        self.ops, self.rows, self.vectors, self.lanes = ops, rows, vectors, lanes
        self.width, self.num_parts = vectors * lanes, rows // SIDE
        self.sums = T.alloc_buffer((rows, vectors * SIDE), F32)

    def at(self, i, j) -> tuple:
        """Return the index of vector j of row i in `sums`."""
        return i, T.ramp(j * SIDE, 1, self.lanes)

    def clear(self) -> None:
        """Start from zeros."""
        for tile, _, _ in self._tiles():
            Tiles.zero(tile)

    @inline
    def load_scaled(self, matrix, row, column, scales, first):
        """Start from rows of a float32 matrix, times ``scales[first]`` and the ones behind it.

        The rows themselves are multiplied.
        """
        for i in range(self.rows):
            for j in T.unroll(self.vectors):
                at = T.meta_var((row + i, column + j * SIDE))
                scale = T.meta_var(broadcast(scales[first + i], self.lanes))
                store(matrix, at, self.lanes, load(matrix, at, self.lanes) * scale)
        self.load(matrix, row, column)

    @inline
    def multiply(self, a, row, b, column, depth, prefetch=None):
        """Add a product, as `RegisterTile` does."""
        for step in range(depth // SIDE):
            if prefetch is not None:
                for u in range(SIDE // UNROLL):
                    prefetch(step * (SIDE // UNROLL) + u)
            self._add(a, row, b, column, step * SIDE)

    def _add(self, a, row, b, column, k) -> None:
        def tile_of_b(j: int) -> tuple:
            buffer, index = b.at(k, column + j * SIDE)
            return buffer, index, buffer.shape[-1]

        self.add_step(lambda i: (a, (row + i * SIDE, k), a.shape[-1]), tile_of_b)

    def add_step(self, a: Callable, b: Callable) -> None:
        """Add the product of a step: ``a(i)`` and ``b(j)`` say where tiles of A and B are.

        They return a buffer, the index of the first element, and the elements of four bytes from
        one row of the tile to the next.
        """
        for i in range(self.num_parts):
            Tiles.load(A_TILES[i], *a(i))
        for j in range(self.vectors):
            Tiles.load(B_TILES[j], *b(j))
        for tile, _, _ in self._tiles():
            Tiles.dot(tile)

    def load(self, matrix, row, column) -> None:
        """Start from rows of a float32 matrix."""
        self._move(Tiles.load, matrix, row, column)

    def take_sums(self) -> None:
        """Store the sums for readers of `sums`."""
        self._move(Tiles.store, self.sums, 0, 0)

    def put(self, matrix, row, column) -> None:
        """Store the sums to rows of a float32 matrix."""
        self._move(Tiles.store, matrix, row, column)

    def _move(self, move, matrix, row, column) -> None:
        for tile, i, j in self._tiles():
            move(tile, matrix, (row + i * SIDE, column + j * SIDE), matrix.shape[-1])

    def _tiles(self) -> list[tuple[int, int, int]]:
        """The tiles of sums: number, row and column."""
        return [(2 * i + j, i, j) for i in range(self.num_parts) for j in range(self.vectors)]


@T.meta_class
class NarrowAmxTile(AmxTile):
    """An `AmxTile` of a single row of tiles."""

    @staticmethod
    def shape(target: VectorTarget) -> tuple[int, int]:
        """Rows and vectors of a wide tile."""
        return SIDE, 2
