# SPDX-License-Identifier: Apache-2.0
"""Online softmax over the products of matrix instructions, in the exp2 domain.

A thread holds every eighth row of a warp's, from `lane / 4` on, and of every eight columns two,
from ``2 * (lane % 4)`` on; four lanes share a row. Its products are registers ``[n, h, e]``: column
``8 * n + 2 * (lane % 4) + e`` of its row h. Matrix instructions have two rows of a thread each.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable

from tvm.script import tirx as T

from ...script import inline
from ...semantics.softmax import NO_SUM, NOTHING_SEEN, with_sink
from ..registers import F32

ROWS = 2  # of a thread, in an instruction
ROW_LANES = 4  # that share a row
SLACK = 8.0  # powers of two by which a running maximum may lag behind


def products_of(num_columns: int, rows: int):
    """Allocate the products of a warp, as its threads hold them.

    Parameters
    ----------
    num_columns : int
        A multiple of eight.
    rows : int
        Of a thread.
    """
    return T.alloc_local((num_columns // 8, rows, 2), F32, layout=None)


@inline
def clear(products):
    """Set all products to 0."""
    for n in T.unroll(products.shape[0]):
        for h in T.unroll(products.shape[1]):
            for e in T.unroll(2):
                products[n, h, e] = T.float32(0)


@inline
def scale_rows(products, factors):
    """Multiply each row by its factor."""
    for n in T.unroll(products.shape[0]):
        for h in T.unroll(products.shape[1]):
            for e in T.unroll(2):
                products[n, h, e] *= factors[h]


@inline
def scale_all(products, factor):
    """Multiply all products by a factor."""
    for n in T.unroll(products.shape[0]):
        for h in T.unroll(products.shape[1]):
            for e in T.unroll(2):
                products[n, h, e] *= factor


def scaled(score, factor):
    """Multiply by a factor, if there is one."""
    return score if factor is None else score * factor


@T.meta_class
class OnlineSoftmax:
    """Running maximum, sum and output of a thread's rows.

    Parameters
    ----------
    isa : Isa
    num_columns : int
        Of the output.
    rows : int
        Of a thread.

    Attributes
    ----------
    row_max : float32 registers
        Of the scores, before a factor of `update`.
    output : products
        The weighted sum of V relative to `row_max`; divided by `row_sum` after `finish`.
    lse : float32 registers
        After `finish`, the base-2 logs of the sums of exponentials.
    """

    def __init__(self, isa, num_columns: int, rows: int):
        self.isa, self.rows = isa, rows
        self.row_max, self.row_sum, self.factor, self.lse = (
            T.alloc_local((rows,), F32, layout=None) for _ in range(4)
        )
        self.output = products_of(num_columns, rows)

    @inline
    def reset(self):
        """Forget all columns."""
        for h in T.unroll(self.rows):
            self.row_max[h] = T.float32(NOTHING_SEEN)
            self.row_sum[h] = T.float32(0)
        clear(self.output)

    @inline
    def update(self, scores, factor=None):
        """Turn scores into weights, and scale what was summed so far where that is needed.

        Scores may have to be multiplied by a positive factor.

        Weights may be as large as ``2 ** SLACK``: after the first columns of a row its maximum
        seldom grows by more, so the output is seldom scaled. Sums come out the same. That of a row
        is left spread over its four lanes.

        The lanes of a warp vote whether to scale, so that they stay together: matrix instructions
        follow, which all of them have to reach at once.
        """
        top = T.alloc_local((self.rows,), F32, layout=None)
        for h in T.unroll(self.rows):
            top[h] = self.row_max[h]
            for n in T.unroll(scores.shape[0]):
                for e in T.unroll(2):
                    top[h] = T.max(top[h], scores[n, h, e])
            top[h] = self.isa.over_lanes(top[h], T.max, ROW_LANES)
        grows = T.meta_var([self._grows(top[h], h, factor) for h in range(self.rows)])
        if self.isa.any_of(functools.reduce(T.Or, grows)):
            for h in T.unroll(self.rows):
                self.factor[h] = self.isa.exp2(scaled(self.row_max[h] - top[h], factor))
                self.row_max[h] = top[h]
                self.row_sum[h] *= self.factor[h]
            scale_rows(self.output, self.factor)
        for h in T.unroll(self.rows):
            top[h] = scaled(self.row_max[h], factor)
            for n in T.unroll(scores.shape[0]):
                for e in T.unroll(2):
                    scores[n, h, e] = self.isa.exp2(self._below(scores[n, h, e], top[h], factor))
                    self.row_sum[h] += scores[n, h, e]

    def _grows(self, top, h, factor):
        if factor is None:
            return top > self.row_max[h] + T.float32(SLACK)
        return (top - self.row_max[h]) * factor > T.float32(SLACK)

    def _below(self, score, top, factor):
        if factor is None:
            return score - top
        return self.isa.fused_multiply_add(score, factor, T.float32(0) - top)

    @inline
    def finish(self, sink_of: Callable = lambda h: None, factor=None):
        """Divide the output by the sums, and find their logs.

        ``sink_of(h)`` is the sink of row h, as `with_sink` takes it, or None. The factor is that of
        `update`.
        """
        for h in T.unroll(self.rows):
            if factor is not None:
                self.row_max[h] = T.max(self.row_max[h] * factor, T.float32(NOTHING_SEEN))
            summed = self.isa.over_lanes(self.row_sum[h], operator.add, ROW_LANES)
            top, weight, total = T.meta_var(self._with_sink(h, summed, sink_of(h)))
            # Not its opposite: the sum of a row that has seen something that is not a number is
            # NaN, and so are the row and its log.
            is_empty = T.meta_var(total <= T.float32(NO_SUM))
            minus_infinity = T.meta_var(T.reinterpret(F32, T.uint32(0xFF800000)))
            self.factor[h] = T.if_then_else(is_empty, T.float32(0), weight / total)
            self.lse[h] = T.if_then_else(is_empty, minus_infinity, top + self.isa.log2(total))
        scale_rows(self.output, self.factor)

    def _with_sink(self, h, total, sink) -> tuple:
        if sink is None:
            return self.row_max[h], T.float32(1), total
        return with_sink(sink, self.row_max[h], total, self.isa)
