# SPDX-License-Identifier: Apache-2.0
"""The vocabulary of `backend` on CPUs: an item of work is done by one thread, with vectors."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import contextmanager, nullcontext

from tvm.script import tirx as T

from ..layout import Slot
from ..spec import KernelSpec
from . import row_copy, simd
from .cos_sin import CosSin
from .row_vectors import RowNumbers


def for_items(
    spec: KernelSpec, count, bytes_each: Callable, body: Callable, *, computed=(), once=tuple
) -> None:
    """Run ``body(i, worker, known)`` for ``i < count``; the items must not depend on each other.

    Parameters
    ----------
    bytes_each : callable
        ``known -> bytes`` that one item reads and writes, a number or an int64 expression.
    computed : sequence of buffers
        With rows that are rotated or blended.
    once : callable
        Emits what all items need to know, and gives `known`.
    """
    known, worker = once(), Worker(spec, computed)
    with worker.numbers.scope() if computed else nullcontext():
        row_copy.for_each(count, bytes_each(known), lambda i: body(i, worker, known))


@contextmanager
def maximum(values, count):
    """Find the largest of `count` int32 values, at least -1; `once` reads it by what is yielded."""

    def read():
        largest = variable(T.int32(-1))
        with T.serial(count) as i:
            largest.set(T.max(largest.get(), values[i]))
        return largest.get()

    yield read


def read_index(value):
    """Materialise an int32 value."""
    return simd.index_temp(value)


def variable(value) -> simd.Register:
    """An int32 variable, with `get` and `set`."""
    return simd.Register(1, "int32", value)


class Worker:
    """One thread."""

    arithmetic = simd

    def __init__(self, spec: KernelSpec, computed: Sequence):
        self.spec, self.lanes = spec, spec.target.lanes
        self.numbers = RowNumbers(spec.target, computed) if computed else None

    def slot(self, slot) -> Slot:
        """Return the location of a slot's rows."""
        return Slot(slot, self.spec, simd.temp)

    def for_elements(self, size: int, body: Callable) -> None:
        """Emit ``body(start, lanes)`` for vectors that cover ``range(size)``."""
        for start, lanes in simd.chunks(size, self.lanes):
            body(start, lanes)

    def constants(self, values: Sequence[float], start, lanes: int, dtype: str = simd.F32):
        """A vector of constants from `start` on."""
        return simd.literal(values[start : start + lanes], dtype)

    def copy_rows(self, count, source: Callable, sink: Callable, begin: int = 0) -> None:
        """Copy elements `begin` to the end of rows, which both are ``i -> (buffer, indices)``."""
        with T.serial(count) as i:
            (to, to_row), (of, of_row) = sink(i), source(i)
            row_copy.copy_row(of, of_row, to, to_row, self.lanes, begin)

    def cos_sin(self, rope) -> _CosSin:
        """Cosines and sines of one position."""
        return _CosSin(rope, self)


class _CosSin:
    """The cosines and sines of one position, in the order in which rows are loaded."""

    def __init__(self, rope, worker: Worker):
        self.row, self.numbers = CosSin(rope, worker.lanes), worker.numbers

    def fill(self, position, inv_freq: Callable | None = None) -> None:
        """Compute the row for an int32 position; see `rope.CosSin`."""
        self.row.fill(position, inv_freq)
        self.row.reorder(self.numbers)

    def rotate_rows(self, count, source: Callable, sink: Callable) -> None:
        """Rotate the rows `source` into the rows `sink`, both ``i -> (buffer, indices)``."""
        self.row.rotate_rows(count, source, sink, self.numbers)
