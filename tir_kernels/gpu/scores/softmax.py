# SPDX-License-Identifier: Apache-2.0
"""From scores to weights: scale, soft-cap, ALiBi, hidden columns and online softmax.

All is in the exp2 domain: logits are multiplied by log2(e).

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
from ...semantics.softmax import HIDDEN, NO_SUM, NOTHING_SEEN, with_sink
from ...spec import LOG2E, KernelSpec
from ..isa import isa_of
from ..registers import F32, I32, temp

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


def soft_cap(isa, score, cap: float | None):
    """Cap a score, which is a logit times log2(e); the score itself without a cap.

    ``tanh(x) = 1 - 2 / (exp(2 * x) + 1)``: its absolute error counts, not the relative one.
    """
    if cap is None:
        return score
    power = isa.exp2(score * T.float32(2 / cap))
    share = temp(T.float32(2) / (power + T.float32(1)))
    return T.float32(cap * LOG2E) * (T.float32(1) - share)


@T.meta_class
class Logits:
    """Turns the products of a tile into logits times log2(e).

    Parameters
    ----------
    spec : KernelSpec
    rows : int
        Of a thread.
    lane : int32 expression
    leaves_scale : bool
        The softmax scales, if nothing stands between: that takes fewer instructions, and some
        registers.
    """

    def __init__(self, spec: KernelSpec, rows: int, lane, leaves_scale: bool = False):
        self.isa = isa_of(spec.target)
        self.cap, self.rows, self.lane = spec.logit_softcap, rows, lane
        self.slopes = tuple(slope * LOG2E for slope in spec.alibi_slopes or ())
        self.has_alibi = bool(self.slopes)
        self.leaves_scale = leaves_scale and self.cap is None and not self.has_alibi
        if self.has_alibi:
            self.slope = T.alloc_local((rows,), F32, layout=None)
            self.own_position = T.alloc_local((rows,), I32, layout=None)

    @inline
    def set_row(self, h, head, position):
        """Let row h be the query of a head at a position; only ALiBi needs to know."""
        self.slope[h] = self.isa.lookup(self.slopes, head)
        self.own_position[h] = position

    def column(self, n, e):
        """Return the column of the tile of a product."""
        return n * 8 + T.truncmod(self.lane, 4) * 2 + e

    def left_of(self, factor):
        """Return what `scale` leaves of a factor to the softmax: if not None, it is positive."""
        return T.Select(factor > T.float32(0), factor, T.float32(1)) if self.leaves_scale else None

    @inline
    def scale(self, scores, factor, position):
        """Scale and cap products, and add the bias.

        Parameters
        ----------
        factor : float32 expression
            Scale of the logits times log2(e).
        position : callable
            Column of the tile -> its RoPE position.
        """
        if self.leaves_scale:
            if T.Not(factor > T.float32(0)):
                scale_all(scores, factor)
        else:
            for n in T.unroll(scores.shape[0]):
                for h in T.unroll(scores.shape[1]):
                    for e in T.unroll(2):
                        scores[n, h, e] = soft_cap(self.isa, scores[n, h, e] * factor, self.cap)
                        if self.has_alibi:
                            distance = T.meta_var(
                                position(self.column(n, e)) - self.own_position[h]
                            )
                            scores[n, h, e] += T.cast(distance, F32) * self.slope[h]

    @inline
    def hide(self, scores, is_visible):
        """Hide the columns that a row does not see: ``is_visible(h, column)``."""
        for n in T.unroll(scores.shape[0]):
            for h in T.unroll(scores.shape[1]):
                for e in T.unroll(2):
                    scores[n, h, e] = T.if_then_else(
                        is_visible(h, self.column(n, e)), scores[n, h, e], T.float32(HIDDEN)
                    )


@T.meta_class
class OnlineSoftmax:
    """Running maximum and sum of a thread's rows; O, their sums of V, is the caller's.

    Parameters
    ----------
    isa : Isa
    rows : int
        Of a thread.

    Attributes
    ----------
    row_max : float32 registers
        Of the scores, before a factor of `update`.
    lse : float32 registers
        After `finish`, the base-2 logs of the sums of exponentials.
    """

    def __init__(self, isa, rows: int):
        self.isa, self.rows = isa, rows
        self.row_max, self.row_sum, self.factor, self.lse = (
            T.alloc_local((rows,), F32, layout=None) for _ in range(4)
        )

    @inline
    def reset(self, o):
        """Forget all columns, of which O holds the sums."""
        for h in T.unroll(self.rows):
            self.row_max[h] = T.float32(NOTHING_SEEN)
            self.row_sum[h] = T.float32(0)
        clear(o)

    def update(self, scores, o, factor=None):
        """Return the weights of scores, in their registers, and scale O where that is needed.

        Parameters
        ----------
        scores, o : products
            O is the weighted sum of V relative to the running maximum.
        factor : float32 expression, optional
            A positive one, by which scores have to be multiplied.

        Notes
        -----
        Weights may be as large as ``2 ** SLACK``: after the first columns of a row its maximum
        seldom grows by more, so O is seldom scaled. Sums come out the same. That of a row is left
        spread over its four lanes.

        The lanes of a warp vote whether to scale, so that they stay together: matrix instructions
        follow, which all of them have to reach at once.
        """
        self._update(scores, o, factor)
        return scores

    @inline
    def _update(self, scores, o, factor):
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
            scale_rows(o, self.factor)
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
    def finish(self, o, sink_of: Callable = lambda h: None, factor=None):
        """Divide O by the sums, and find their logs.

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
        scale_rows(o, self.factor)

    def _with_sink(self, h, total, sink) -> tuple:
        if sink is None:
            return self.row_max[h], T.float32(1), total
        return with_sink(sink, self.row_max[h], total, self.isa)
