# SPDX-License-Identifier: Apache-2.0
"""Results of attention: the rows of O and LSE."""

from tvm.script import tirx as T

from ...script import inline
from ...semantics.partial_states import MergedLse
from ...semantics.softmax import inverse_total, log_sum
from ...spec import KernelSpec
from .. import simd
from ..blend import weighted
from ..simd import broadcast, constant, load, store


@T.meta_class
class Output:
    """Rows of O and LSE, each of a token and a query head.

    Parameters
    ----------
    spec : KernelSpec
    o, lse : Buffers
        The arguments of the kernel.
    merges : bool
        Whether results are merged with what the rows hold, instead of replacing it.
    """

    def __init__(self, spec: KernelSpec, o, lse, *, merges: bool = False):
        self.spec, self.o, self.lse, self.merges = spec, o, lse, merges
        if merges:
            self.old_weight = T.local_scalar("float32")
            self.new_weight = T.local_scalar("float32")

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
                old = weighted(self.o, at, self.old_weight, lanes)
                result = old + result * broadcast(self.new_weight, lanes)
            store(self.o, at, lanes, result)

    @inline
    def finish(self, token, head, sums, row, row_max, row_sum):
        """Divide row `row` of `sums` by the sum of its weights, and store it.

        `row_max` is the maximum of its scores, which are in the exp2 domain.
        """
        total = row_sum
        inverse = inverse_total(total)
        if self.merges:
            self.put_lse(token, head, log_sum(row_max, total))
        quotient = T.meta_var(lambda c, n: load(sums, (row, c), n) * broadcast(inverse, n))
        self.put_row(token, head, 0, self.spec.v_head_dim, quotient)
        if not self.merges:
            self.put_lse(token, head, log_sum(row_max, total))

    @inline
    def clear(self, token, head):
        """Store the result of a row that sees nothing."""
        self.put_row(token, head, 0, self.spec.v_head_dim, lambda c, n: constant(0.0, n))
        self.put_lse(token, head, log_sum(T.float32(0), T.float32(0)))
