# SPDX-License-Identifier: Apache-2.0
"""Steps of the products of register tiles on AArch64, which take more than a vector and a number.

A step adds the products of two elements of each row of A, in vectors, and of two rows of B. A
`RegisterTile` calls `begin` before its steps, and `end` behind them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from tvm.script import tirx as T

from ..simd import broadcast, load, shuffle, temp

ROWS = 4  # of a transposed matrix: a vector


class Transposed(NamedTuple):
    """A matrix whose rows are the columns of a buffer."""

    buffer: object

    def __getitem__(self, at: tuple):
        row, column = at
        return self.buffer[column, row]


class LaneSteps:
    """Multiply-adds that take a lane of a vector: elements of A are not put into every lane."""

    @staticmethod
    def begin(tile) -> None:
        """Sums are as they are."""

    @staticmethod
    def end(tile) -> None:
        """Sums are as they are."""

    @staticmethod
    def add(tile, a, row, b, column, ks: range, first_k) -> None:
        """Add a step of products to the sums of a tile."""
        elements = _elements(a, row, tile.rows, ks, first_k, tile.ops.dtype)
        for k in ks:
            vectors = _vectors(tile, b, column, first_k + k)
            for i in range(tile.rows):
                element = broadcast(elements(i, k), tile.lanes)
                for j, vector in enumerate(vectors):
                    sums = tile.ops.fma(tile.sums[tile.at(i, j)], element, vector, tile.lanes)
                    T.buffer_store(tile.sums, sums, list(tile.at(i, j)))


class MatrixSteps:
    """Products of matrices of 2 x 4 and 4 x 2 bfloat16 numbers (``bfmmla``).

    During the steps, vector j of rows 2i and 2i + 1 has the sums of both rows for the first two
    columns, and for the last two.
    """

    @staticmethod
    def begin(tile) -> None:
        """Bring the sums of two rows together."""
        for i in range(0, tile.rows, 2):
            for j in range(tile.vectors):
                places = [list(tile.at(i + n, j)) for n in range(2)]
                rows = [temp(tile.sums[tuple(at)], tile.lanes) for at in places]
                for at, order in zip(places, ([0, 1, 4, 5], [2, 3, 6, 7]), strict=True):
                    T.buffer_store(tile.sums, shuffle(rows, order), at)

    end = begin  # which undoes itself

    @staticmethod
    def add(tile, a, row, b, column, ks: range, first_k) -> None:
        """Add a step of products to the sums of a tile."""
        dtype = tile.ops.dtype
        matrices = _row_pairs(a, row, tile.rows, first_k, dtype)
        columns = [_vectors(tile, b, column, first_k + k) for k in ks]
        for j, pair in enumerate(zip(*columns, strict=True)):
            for n, order in enumerate(([0, 4, 1, 5], [2, 6, 3, 7])):
                right = temp(shuffle(pair, order), 4, dtype)
                for i, left in enumerate(matrices):
                    at = list(tile.at(2 * i + n, j))
                    sums = tile.ops.add_matrices(tile.sums[tuple(at)], left, right)
                    T.buffer_store(tile.sums, sums, at)


STEPS = {"lanes": LaneSteps, "matrices": MatrixSteps}  # by the operands' `steps`


def _vectors(tile, b, column, k) -> list:
    """Row `k` of the columns of a tile of B."""
    lanes, dtype = tile.lanes, tile.ops.dtype
    return [
        temp(load(*b.at(k, column + j * lanes), lanes, dtype), lanes, dtype)
        for j in range(tile.vectors)
    ]


def _transposed_rows(a: Transposed, row, num_rows: int, k, dtype: str) -> list:
    """Column `k` of some rows of a transposed matrix, a vector for four of them."""
    return [
        temp(load(a.buffer, (k, row + i), ROWS, dtype), ROWS, dtype)
        for i in range(0, num_rows, ROWS)
    ]


def _elements(a, row, num_rows: int, ks: range, first_k, dtype: str) -> Callable:
    """Return ``(i, k)``, both ints: element ``a[row + i, first_k + k]``, a lane of a vector."""
    if isinstance(a, Transposed):
        columns = [_transposed_rows(a, row, num_rows, first_k + k, dtype) for k in ks]
        return lambda i, k: shuffle([columns[k][i // ROWS]], [i % ROWS])
    rows = [
        temp(load(a, (row + i, first_k), len(ks), dtype), len(ks), dtype) for i in range(num_rows)
    ]
    return lambda i, k: shuffle([rows[i]], [k])


def _row_pairs(a, row, num_rows: int, first_k, dtype: str) -> list:
    """Two elements of one row and two of the next, for every two rows."""
    if isinstance(a, Transposed):
        columns = [_transposed_rows(a, row, num_rows, first_k + k, dtype) for k in range(2)]
        orders = ([0, 4, 1, 5], [2, 6, 3, 7])
        return [
            temp(shuffle(pair, order), 4, dtype)
            for pair in zip(*columns, strict=True)
            for order in orders
        ]
    rows = [temp(load(a, (row + i, first_k), 2, dtype), 2, dtype) for i in range(num_rows)]
    pairs = zip(rows[::2], rows[1::2], strict=True)
    return [temp(shuffle(pair, range(4)), 4, dtype) for pair in pairs]
