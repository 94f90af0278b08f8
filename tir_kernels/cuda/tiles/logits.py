# SPDX-License-Identifier: Apache-2.0
"""Scores from products: scale, soft-cap, ALiBi and masks, in the registers of a thread."""

from __future__ import annotations

from collections.abc import Callable

from tvm.script import tirx as T

from ...semantics.softmax import HIDDEN
from ...spec import LOG2E, KernelSpec
from ..emit import F32, Registers
from ..scalars import exp2, lookup, temp
from .online_softmax import Accumulators


def soft_cap(score, cap: float | None):
    """Cap a score, which is a logit times log2(e); the score itself without a cap.

    ``tanh(x) = 1 - 2 / (exp(2 * x) + 1)``: its absolute error counts, not the relative one.
    """
    if cap is None:
        return score
    power = exp2(score * T.float32(2 / cap))
    share = temp(T.float32(2) / (power + T.float32(1)))
    return T.float32(cap * LOG2E) * (T.float32(1) - share)


class AlibiBias:
    """The bias of a thread's rows.

    Parameters
    ----------
    spec : KernelSpec
        With `alibi_slopes`.
    rows : int
        Of a thread.
    """

    def __init__(self, spec: KernelSpec, rows: int):
        self.values = [slope * LOG2E for slope in spec.alibi_slopes]
        self.slope = Registers(rows, F32, "slope")
        self.position = Registers(rows, "int32", "own_position")

    @staticmethod
    def of(spec: KernelSpec, rows: int) -> AlibiBias | None:
        """The bias, or None where the spec has none."""
        return AlibiBias(spec, rows) if spec.alibi_slopes else None

    def set_row(self, h: int, head, position) -> None:
        """Let row h be the query of a head at a position."""
        self.slope[h] = lookup(self.values, head)
        self.position[h] = position

    def at(self, h: int, position):
        """The bias of row h at a position of K."""
        return T.cast(position - self.position[h], F32) * self.slope[h]


def map_scores(scores: Accumulators, lane, body) -> None:
    """Let scores be ``body(score, h, column)``: of row h, and a column of the tile."""

    def replace(n, h, e):
        column = n * 8 + T.truncmod(lane, 4) * 2 + e
        scores[n, h, e] = body(scores[n, h, e], h, column)

    scores.for_each(replace)


def hide(scores: Accumulators, lane, is_visible) -> None:
    """Hide the columns that a row does not see: ``is_visible(h, column)``."""

    def body(score, h, column):
        return T.if_then_else(is_visible(h, column), score, T.float32(HIDDEN))

    map_scores(scores, lane, body)


def to_logits(
    spec: KernelSpec, scores: Accumulators, lane, factor, bias: AlibiBias | None, position: Callable
) -> None:
    """Make logits times log2(e) of products.

    Parameters
    ----------
    factor : float32 expression
        Scale of the logits times log2(e).
    position : callable
        Column -> its RoPE position.
    """

    def body(score, h, column):
        score = soft_cap(score * factor, spec.logit_softcap)
        return score + bias.at(h, position(column)) if bias else score

    map_scores(scores, lane, body)
