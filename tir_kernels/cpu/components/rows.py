# SPDX-License-Identifier: Apache-2.0
"""Workers of kernels that move rows: a thread of a CPU does an item of work, with vectors."""

from __future__ import annotations

import functools
from collections.abc import Sequence

from tvm.script import tirx as T

from ...script import inline
from ...semantics.partial_states import selected
from ...spec import KernelSpec
from .. import simd
from ..row_vectors import RowNumbers

# Annotates the parallel loop over items with the bytes that one of them reads and writes. With
# fewer than these (20 us or so) in all, `compiler.lowering` lets the caller's thread do the loop.
ITEM_BYTES = "pagedkv.item_bytes"
SERIAL_BELOW_BYTES = 512 * 1024


def items(count, item_bytes):
    """Loop over items that do not depend on each other; a thread takes a contiguous range."""
    return T.parallel(count, annotations={ITEM_BYTES: item_bytes})


@T.meta_class
class Worker:
    """A thread, which has all rows and columns of an item to itself."""

    arithmetic = simd

    def __init__(self, spec: KernelSpec):
        self.spec, self.lanes = spec, spec.target.lanes

    def items(self, count, item_bytes):
        """Loop over items; see `items`."""
        return items(count, item_bytes)

    def sync(self) -> None:
        """A thread does not wait for itself."""

    def table(self, rows: int, size: int):
        """Allocate a float32 array ``[rows, size]``."""
        return T.alloc_buffer((rows, size), simd.F32)

    def elements(self, size: int):
        """Loop over the first elements of vectors, of `lanes` elements each."""
        return T.unroll(0, size - size % self.lanes, step=self.lanes)

    def rest(self, size: int) -> int:
        """Return how many elements lie behind these vectors."""
        return size % self.lanes


@T.meta_class
class RowBlend:
    """Sums rows of some buffers times their weights into the row of the first one.

    Parameters
    ----------
    worker : Worker
    buffers : sequence of buffers whose last axis is the row.
    """

    def __init__(self, worker: Worker, buffers: Sequence):
        self.buffers, self.numbers = buffers, RowNumbers(worker.spec.target, buffers)
        self.width = int(buffers[0].shape[-1])
        self.rest = self.width % self.numbers.wide
        self.numbers.open_scope()

    def rows(self, count):
        """Loop over the rows of an item."""
        return T.serial(count)

    @inline
    def blend(self, index, weights):
        """Blend the rows at `index`; the case of no weight that is zero is much cheaper."""
        if self._are_positive(weights):
            self._blend(index, weights, False)
        else:
            self._blend(index, weights, True)

    @inline
    def _blend(self, index, weights, has_zero):
        for column in T.unroll(0, self.width - self.rest, step=self.numbers.wide):
            self._blend_chunk((*index, column), self.numbers.wide, weights, has_zero)
        if self.rest > 0:
            self._blend_chunk((*index, self.width - self.rest), self.rest, weights, has_zero)

    def _are_positive(self, weights: Sequence):
        return functools.reduce(T.And, [weight > T.float32(0) for weight in weights])

    def _blend_chunk(self, index, count: int, weights: Sequence, has_zero: bool) -> None:
        lanes = self.numbers.lanes_of(count)

        def scaled(value, weight):
            if has_zero:
                return selected(value, weight, lanes, simd)
            return value * simd.broadcast(weight, lanes)

        total = None
        for buffer, weight in zip(self.buffers, weights, strict=True):
            vectors = [scaled(x, weight) for x in self.numbers.load(buffer, index, count)]
            total = (
                vectors if total is None else [a + b for a, b in zip(total, vectors, strict=True)]
            )
        self.numbers.store(self.buffers[0], index, count, total)
