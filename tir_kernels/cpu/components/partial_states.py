# SPDX-License-Identifier: Apache-2.0
"""Partial states ``(o, lse)`` of splits, and their merge."""

from tvm.script import tirx as T

from ...script import inline
from ...semantics.softmax import NOTHING_SEEN
from ...spec import KernelSpec
from ..simd import F32, broadcast, constant, exp2, load, store_row
from .workspace import Workspace

_TOP, _TOTAL = range(2)
VECTORS = 4  # of a row that are summed at once


@T.meta_class
class PartialStates:
    """States of rows that several splits attend to, each to some of the positions.

    A split has two slots: the even one for the rows that an earlier split began, the odd one for
    those that it begins and does not end.

    Parameters
    ----------
    spec : KernelSpec
    num_splits : int32 expression
    num_rows : int
        Rows that a slot has room for.
    """

    def __init__(self, spec: KernelSpec, num_splits, num_rows: int):
        self.spec, self.lanes = spec, spec.target.lanes
        self._o = Workspace(num_splits * 2, (num_rows, spec.v_head_dim))
        self._states = Workspace(num_splits * 2, (2, num_rows))
        self.o, self.states = self._o.buffer, self._states.buffer

    @inline
    def free(self):
        """Give the memory back, when all is merged."""
        self._states.free()  # the last one first, as the pool likes it
        self._o.free()

    @inline
    def put(self, split_id, is_continued, row, sums, source, row_max, row_sum):
        """Keep row `source` of `sums`, and its maximum and sum, as row `row` of a split."""
        slot = T.cast(split_id * 2 + T.if_then_else(is_continued, 0, 1), "int64")
        width, o = T.meta_var((self.spec.v_head_dim, self.o))
        store_row(o, (slot, row), width, self.lanes, lambda i, n: load(sums, (source, i), n))
        self.states[slot, _TOP, row] = row_max
        self.states[slot, _TOTAL, row] = row_sum

    @inline
    def merge(self, first_split, num_splits, row, output, token, head):
        """Finish a row that `first_split` begins and the splits after it continue."""
        states, slot = T.meta_var((self.states, lambda i: self._slot(first_split, i)))
        top = T.float32(NOTHING_SEEN)
        total = T.float32(0)
        for i in range(num_splits):
            top = T.max(top, states[slot(i), _TOP, row])
        for i in range(num_splits):
            factor = exp2(states[slot(i), _TOP, row] - top, 1)
            states[slot(i), _TOP, row] = factor
            total += factor * states[slot(i), _TOTAL, row]
        normalizer, log = T.meta_var(output.normalizer(head, top, total))
        output.put_lse(token, head, log)
        inverse = normalizer

        @inline
        def merge_columns(first, width):
            sums = T.alloc_local((width,), F32)
            store_row(sums, (), width, self.lanes, lambda c, n: constant(0.0, n))
            for i in range(num_splits):
                factor = states[slot(i), _TOP, row] * inverse
                o = T.meta_var(lambda c, n: load(self.o, (slot(i), row, first + c), n))
                store_row(
                    sums,
                    (),
                    width,
                    self.lanes,
                    lambda c, n: load(sums, (c,), n) + o(c, n) * broadcast(factor, n),
                )
            output.put_row(token, head, first, width, lambda c, n: load(sums, (c,), n))

        width, step = T.meta_var((self.spec.v_head_dim, VECTORS * self.lanes))
        for i in range(width // step):
            merge_columns(i * step, step)
        if width % step > 0:
            merge_columns(width - width % step, width % step)

    @staticmethod
    def _slot(first_split, i):
        """Return the slot of the i-th split of a row."""
        return T.cast((first_split + i) * 2 + T.if_then_else(i == 0, 1, 0), "int64")
