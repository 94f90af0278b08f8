# SPDX-License-Identifier: Apache-2.0
"""Stores of the sums of a task: some rows and a block of output features."""

from collections.abc import Callable, Sequence

from tvm.script import tirx as T

from tir_kernels.cpu.isa.simd import load, store
from tir_kernels.script import inline


class Output:
    """Where the sums of a task go, and what is added to them.

    Parameters
    ----------
    out : Buffer
    row_of : callable
        ``row_of(row)`` is the row of `out` that row `row` of the task goes to.
    addends : sequence of (Buffer, callable)
        As `out` and `row_of`; pairs without a buffer are left out. A vector has None in place of
        the callable.
    """

    def __init__(self, out, row_of: Callable, addends: Sequence[tuple] = ()):
        self.out, self.row_of = out, row_of
        self.addends = [each for each in addends if each[0] is not None]

    def store(self, row, column, value, lanes: int) -> None:
        """Store sums of consecutive columns of a row, plus what is added to them."""
        for buffer, row_of in self.addends:
            at = (column,) if row_of is None else (row_of(row), column)
            value = value + load(buffer, at, lanes)
        store(self.out, (self.row_of(row), column), lanes, value)


@inline
def store_sums(matrix, sums, block, count, output):
    """Store the sums of a block; the last one may have fewer columns than `sums`.

    Parameters
    ----------
    matrix : OutputBlocks
    sums : float32 Buffer ``[rows, width]``
    block, count : int64 expression
        The block, and the number of rows.
    output : Output
    """
    last = T.meta_var(matrix.num_blocks - 1)
    if block < last:
        for row in range(count):
            _store_row(matrix, sums, block, row, matrix.width, output)
    else:
        for row in range(count):
            _store_row(matrix, sums, block, row, matrix.out_features - last * matrix.width, output)


@inline
def _store_row(matrix, sums, block, row, width, output):
    """Store the first `width` columns of a row of a block."""
    lanes = T.meta_var(matrix.target.lanes)
    first = T.meta_var(block * matrix.width)
    whole = T.meta_var(width // lanes * lanes)
    for at in T.unroll(0, whole, step=lanes):
        output.store(row, first + at, load(sums, (row, at), lanes), lanes)
    if whole < width:
        for at in range(T.int64(whole), T.int64(width)):
            output.store(row, first + at, load(sums, (row, at), 1), 1)
