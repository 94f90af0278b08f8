# SPDX-License-Identifier: Apache-2.0
"""Constants and final values of the online softmax in the exp2 domain."""

from __future__ import annotations

from tvm.script import tirx as T

from ..vectors import F32

# Running maximum of a row that has seen no column: finite, so that `-inf - top` is not NaN, and no
# larger than any score, so that every finite score counts.
NOTHING_SEEN = -3.4028234663852886e38
HIDDEN = float("-inf")  # score of a column that a row must not see: its weight is 0
NO_SUM = 0.5  # the sum of a row that has seen a column is at least 1: its own maximum


def inverse_total(total):
    """``1 / total``; 1 for a row that has seen nothing, whose columns are 0; NaN for NaN."""
    return T.Select(total < T.float32(NO_SUM), T.float32(1), T.float32(1) / total)


def with_sink(sink, top, total, arithmetic) -> tuple:
    """Let a sink into the softmax of a row: its maximum, the factor of its sums, and its sum.

    A sink joins the sum alone. `sink`, in the exp2 domain, may be -inf: none. One that is NaN or
    +inf makes the sum NaN. `arithmetic` is `cpu.simd` or `cuda.scalars`.
    """
    sink, top = arithmetic.temp(sink, 1), arithmetic.temp(top, 1)
    one, merged = T.float32(1), arithmetic.temp(T.max(top, sink), 1)
    # The larger one weighs 1, but for +inf, of which the difference is NaN.
    smaller = arithmetic.temp(arithmetic.exp2(T.min(top, sink) - merged, 1), 1)
    factor = arithmetic.temp(T.Select(top >= sink, one, smaller), 1)
    weight = T.Select(top >= sink, smaller, one + (sink - merged))
    return merged, factor, arithmetic.temp(total * factor + weight, 1)


def sum_of_sink(sink, top):
    """The sum of a row that has seen a sink alone, relative to ``top = max(sink, NOTHING_SEEN)``.

    0 for a sink of -inf, which is none; NaN for one that is NaN or +inf.
    """
    total = T.float32(1) + (sink - top)
    return T.Select(total < T.float32(NO_SUM), T.float32(0), total)


def log_sum(top, total):
    """Base-2 log of the sum of exponentials; -inf for a row that has seen nothing; NaN for NaN."""
    empty = T.reinterpret(F32, T.uint32(0xFF800000))
    return T.if_then_else(total < T.float32(NO_SUM), empty, top + T.log2(total))
