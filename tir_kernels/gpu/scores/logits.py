# SPDX-License-Identifier: Apache-2.0
"""Logits from products: scale, soft-cap, ALiBi and hidden columns, in registers of a thread."""

from __future__ import annotations

from tvm.script import tirx as T

from ...script import inline
from ...semantics.softmax import HIDDEN
from ...spec import LOG2E, KernelSpec
from ..isa import isa_of
from ..registers import F32, I32, temp
from .softmax import scale_all


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
