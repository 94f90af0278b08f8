# SPDX-License-Identifier: Apache-2.0
"""How the operands of attention's products are packed: float32 elements, or bfloat16 pairs.

Q, K and V may have any type: the float32 operands convert on the way. Both kinds keep

* Q as rows ``[row, depth]``,
* a tile of K transposed, ``[depth, position]``,
* the weights as rows ``[row, position]``,
* a tile of V as rows ``[position, column]``,

where an element along a summed axis is one number, or two neighbours (`bf16.PairOperands`).
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext

from tvm.script import tirx as T

from ...script import inline
from .shuffles import concatenate, transpose
from .simd import F32, broadcast, constant, load, steps, store, temp

ROWS_AT_ONCE = 4  # of V


class Float32Operands:
    """One float32 number is one element.

    Parameters
    ----------
    lanes : int
    steps : str, optional
        What adds the products of `RegisterTile`, if it is not `fma`: a key of `matrices.STEPS`.
    """

    dtype = F32
    values_per_element = 1
    llvm_helpers = ()
    scale_in_q = True  # the scores need no scaling any more
    broadcasts_from_memory = False  # the instruction that multiplies
    product_tile = None  # what multiplies matrices instead of `RegisterTile`

    def __init__(self, lanes: int, steps: str | None = None):
        self.lanes, self.steps = lanes, steps

    def begin(self, buffers) -> None:
        """Nothing to prepare."""

    def begin_task(self) -> None:
        """Nothing to prepare."""

    def end_task(self) -> None:
        """Nothing to give back."""

    def scope(self):
        """No helpers."""
        return nullcontext()

    def fma(self, total, a, b, lanes: int):
        """Return ``total + a * b``; LLVM contracts it to a fused multiply-add."""
        return total + a * b

    def load_q(self, buffer, index, lanes: int, factor):
        """`lanes` elements of Q."""
        return load(buffer, index, lanes) * broadcast(factor, lanes)

    def load_rotated_q(self, row, element, lanes: int, factor):
        """`lanes` elements of a float32 row that was rotated."""
        return self.load_q(row, (element,), lanes, factor)

    def pack(self, row, element, lanes: int):
        """`lanes` elements of a float32 row."""
        return load(row, (element,), lanes)

    def unpack(self, value) -> list:
        """The numbers of a vector of elements, each as a float32 vector."""
        return [temp(value, self.lanes)]

    def repack(self, numbers: list):
        """The inverse of `unpack`."""
        return numbers[0]

    def load_k(self, tile, row, element, lanes: int):
        """`lanes` elements of a row of K."""
        return tile.load_k(row, element, lanes)

    def load_v(self, tile, rows, column, lanes: int) -> list:
        """`lanes` columns of the row of V among `rows`."""
        return [tile.load_v(rows[0], column, lanes)]

    def select(self, value, is_seen: Sequence, lanes: int):
        """A vector of V if its position ``is_seen[0]``, else zeros."""
        return T.Select(broadcast(is_seen[0], lanes), value, constant(0.0, lanes))

    def packed_v(self, tile, t: int, column, lanes: int, is_held: Sequence):
        """Row `t` of a tile of V as it is packed, zeros if it is not held."""
        v = tile.load_v(t, column, lanes)
        return T.Select(is_held[0], v, constant(0.0, lanes)) if is_held else v

    def store_numbers(self, buffer, row, vectors) -> None:
        """Store a row of a buffer of elements, as float32 vectors of its numbers in order."""
        for v, vector in enumerate(vectors):
            store(buffer, (row, v * self.lanes), self.lanes, vector)


def within(position, begin, end):
    """Whether a position is in ``begin .. end - 1``; without a begin: before the end."""
    return position < end if begin is None else T.And(position >= begin, position < end)


def transpose_k(ops, rows, first, packed, num_elements: int, column) -> None:
    """Transpose as many rows of K as a vector has lanes into columns from `column` on.

    `packed` gives buffer and index of ``(element, column)``.
    """
    lanes = ops.lanes
    tile = rows.tile(first, lanes)

    for start, parts in steps(num_elements, lanes, 1):
        for c in parts:
            # A narrow chunk is several small squares, side by side.
            squares = [
                transpose(
                    [ops.load_k(tile, s + i, start + c.start, c.lanes) for i in range(c.lanes)],
                    ops.dtype,
                )
                for s in range(0, lanes, c.lanes)
            ]
            for d in range(c.lanes):
                value = concatenate([square[d] for square in squares], c.lanes, ops.dtype)
                store(*packed(start + c.start + d, column), lanes, value, ops.dtype)


@inline
def copy_v(ops, rows, first, packed, width: int, num_positions, end=None, begin=None):
    """Pack rows of V from `first` on; those from `end` on, or before `begin`, become zeros.

    ``packed(row, column)`` gives buffer and index of an element.
    """
    for i in range(num_positions // ROWS_AT_ONCE):
        row = T.meta_var(i * ROWS_AT_ONCE)
        tile = T.meta_var(rows.tile(first + row, ROWS_AT_ONCE))
        for c in range(width // ops.lanes):
            _copy_v(ops, tile, first, row, packed, c * ops.lanes, ops.lanes, begin, end)
        if width % ops.lanes > 0:
            tail = T.meta_var(width % ops.lanes)
            _copy_v(ops, tile, first, row, packed, width - tail, tail, begin, end)


def _copy_v(ops, tile, first, row, packed, column, lanes: int, begin, end) -> None:
    """Pack a vector of columns of a tile of rows."""
    for t in range(0, ROWS_AT_ONCE, ops.values_per_element):
        positions = [first + row + t + n for n in range(ops.values_per_element)]
        is_held = [] if end is None else [within(p, begin, end) for p in positions]
        value = ops.packed_v(tile, t, column, lanes, is_held)
        store(*packed((row + t) // ops.values_per_element, column), lanes, value, ops.dtype)
