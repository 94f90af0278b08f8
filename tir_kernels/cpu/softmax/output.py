# SPDX-License-Identifier: Apache-2.0
"""Results of attention: the rows of O and LSE, and partial states, which are merged in order."""

from tvm.script import tirx as T

from ...script import inline
from ...semantics.softmax import (
    NOTHING_SEEN,
    MergedLse,
    inverse_total,
    log_sum,
    selected,
    with_sink,
)
from ...signatures.inputs import AttentionInputs
from ...spec import LOG2E, KernelSpec
from ..isa import simd
from ..isa.simd import broadcast, exp2, load, multiply_add, store, store_row, temp
from ..tasks import Workspace

_TOP, _TOTAL = range(2)


@T.meta_class
class Output:
    """Rows of O and LSE, each of a token and a query head.

    Parameters
    ----------
    spec : KernelSpec
    a : AttentionInputs
        Whose `o` and `lse` they are; `sink_logits`, if there are any, join the softmax of each row.
    merges : bool
        Whether results are merged with what the rows hold, instead of replacing it.
    begin_with_sinks : bool
        Whether the rows of the kernel began with their sinks, see `RowSoftmax.begin_with_sinks`.
    """

    def __init__(
        self,
        spec: KernelSpec,
        a: AttentionInputs,
        *,
        merges: bool = False,
        begin_with_sinks: bool = False,
    ):
        self.spec, self.o, self.lse, self.merges = spec, a.o, a.lse, merges
        self.sink_logits, self.begin_with_sinks = a.sink_logits, begin_with_sinks
        if merges:
            self.old_weight = T.local_scalar("float32")
            self.new_weight = T.local_scalar("float32")

    def normalizer(self, head, row_max, row_sum) -> tuple:
        """Return the factor of a row's sums and the log of its sum, its sink logit included.

        `row_max` is the maximum of its scores, which are in the exp2 domain.
        """
        if self.sink_logits is None or self.begin_with_sinks:
            return inverse_total(row_sum), log_sum(row_max, row_sum)
        return self._with_sink(head, row_max, row_sum)

    def _with_sink(self, head, row_max, row_sum) -> tuple:
        sink = self.sink_logits[head] * T.float32(LOG2E)
        top, factor, total = with_sink(sink, row_max, row_sum, simd)
        return temp(factor * inverse_total(total), 1), log_sum(top, total)

    @inline
    def put_lse(self, token, head, value):
        """Store the log of a row's sum; what merges does so before it puts the row's columns."""
        if self.merges:
            merged = T.meta_var(MergedLse(self.lse[token, head], value, 1, simd))
            self.old_weight = merged.weights[0]
            self.new_weight = merged.weights[1]
            self.lse[token, head] = merged.lse
        else:
            self.lse[token, head] = value

    def put_row(self, token, head, first, width: int, value) -> None:
        """Store `width` columns of a row from `first` on: vectors ``value(start, lanes)``."""
        for start, lanes in simd.chunks(width, self.spec.target.lanes):
            at, result = (token, head, first + start), value(start, lanes)
            if self.merges:
                held = temp(load(self.o, at, lanes), lanes)
                old = selected(held, self.old_weight, lanes, simd)  # whatever O holds
                result = old + result * broadcast(self.new_weight, lanes)
            store(self.o, at, lanes, result)

    @inline
    def finish(self, token, head, sums, row, row_max, row_sum):
        """Divide row `row` of `sums` by the sum of its weights, and store it."""
        total = row_sum
        factor, log = T.meta_var(self.normalizer(head, row_max, total))
        inverse = factor
        if self.merges:
            self.put_lse(token, head, log)
        quotient = T.meta_var(lambda c, n: load(sums, (row, c), n) * broadcast(inverse, n))
        self.put_row(token, head, 0, self.spec.v_head_dim, quotient)
        if not self.merges:
            self.put_lse(token, head, log)

    @inline
    def clear(self, token, head):
        """Store the result of a row that sees nothing."""
        zero, log = T.meta_var(self._nothing(head))
        self.put_row(token, head, 0, self.spec.v_head_dim, lambda c, n: broadcast(zero, n))
        self.put_lse(token, head, log)

    def _nothing(self, head) -> tuple:
        """Return the elements of such a row, NaN with a sink that is NaN or +inf, and its log."""
        if self.sink_logits is None:
            return T.float32(0), log_sum(T.float32(0), T.float32(0))
        factor, log = self._with_sink(head, T.float32(NOTHING_SEEN), T.float32(0))
        return temp(T.Select(factor >= T.float32(0), T.float32(0), factor), 1), log


@T.meta_class
class PartialStates:
    """States of rows in numbered slots: sums of V, and those of the softmax.

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


@inline
def finish(rope, output, token, head, sums, row, row_max, row_sum):
    """Store a row that has seen everything; sums of V are multiplied back, if V was."""
    rope.restore(sums, row)
    output.finish(token, head, sums, row, row_max, row_sum)
