# SPDX-License-Identifier: Apache-2.0
"""Partial states of rows, which are merged in order: sums of V, and those of the softmax."""

from tvm.script import tirx as T

from ...script import inline
from ...spec import KernelSpec
from ..isa.simd import broadcast, exp2, load, multiply_add, store_row, temp
from ..workspace import Workspace

_TOP, _TOTAL = range(2)


@T.meta_class
class PartialStates:
    """States of rows in numbered slots.

    The positions of a sequence are cut into segments at places of its own, and the states of its
    segments are merged from left to right by one operation, `add`. So a result has the same bits
    whichever tasks attended to the segments, and when.

    Parameters
    ----------
    spec : KernelSpec
    num_slots : int32 expression
    num_rows : int
        Rows that a slot has room for.
    """

    def __init__(self, spec: KernelSpec, num_slots, num_rows: int):
        self.spec, self.lanes, self.num_rows = spec, spec.target.lanes, num_rows
        count = T.cast(num_slots, "int64") * num_rows
        self._o = Workspace(count, (spec.v_head_dim,))
        self._softmax = Workspace(count, (2,))
        self.o, self.softmax = self._o.buffer, self._softmax.buffer

    @inline
    def free(self):
        """Give the memory back, when all is merged."""
        self._softmax.free()  # the last one first, as the pool likes it
        self._o.free()

    def at(self, slot, row):
        """Return where a row of a slot is, in `o`."""
        return temp(T.cast(slot, "int64") * self.num_rows + row, 1, "int64")

    def result(self, at) -> tuple:
        """Return `o`, the row in it, its maximum and sum, as `Output.finish` takes them."""
        return self.o, at, self.softmax[at, _TOP], self.softmax[at, _TOTAL]

    @inline
    def put(self, at, sums, source, row_max, row_sum):
        """Keep row `source` of `sums`, and its maximum and sum."""
        width, o = T.meta_var((self.spec.v_head_dim, self.o))
        store_row(o, (at,), width, self.lanes, lambda i, n: load(sums, (source, i), n))
        self.softmax[at, _TOP] = row_max
        self.softmax[at, _TOTAL] = row_sum

    @inline
    def add(self, at, sums, source, row_max, row_sum):
        """Merge the state of the positions that come next into a state that is kept.

        Products are fused in one way, wherever this is compiled.
        """
        width, o = T.meta_var((self.spec.v_head_dim, self.o))
        top = T.max(self.softmax[at, _TOP], row_max)
        earlier = exp2(self.softmax[at, _TOP] - top, 1)
        later = exp2(row_max - top, 1)
        product = self.softmax[at, _TOTAL] * earlier
        self.softmax[at, _TOTAL] = multiply_add(row_sum, later, product, 1)
        self.softmax[at, _TOP] = top
        store_row(
            o,
            (at,),
            width,
            self.lanes,
            lambda i, n: multiply_add(
                load(sums, (source, i), n),
                broadcast(later, n),
                temp(load(o, (at, i), n) * broadcast(earlier, n), n),
                n,
            ),
        )
