# SPDX-License-Identifier: Apache-2.0
"""The softmax in the exp2 domain: soft-cap, constants, final values, merges of partial states."""

from __future__ import annotations

import math

from tvm.script import tirx as T

from ..spec import LOG2E
from ..vectors import F32, vector_type

# Running maximum of a row that has seen no column: finite, so that `-inf - top` is not NaN, and no
# larger than any score, so that every finite score counts.
NOTHING_SEEN = -3.4028234663852886e38
HIDDEN = float("-inf")  # score of a column that a row must not see: its weight is 0
NO_SUM = 0.5  # the sum of a row that has seen a column is at least 1: its own maximum

# log2(x) is the sum of these times t, t^3, t^5, ... with t = (x - 1) / (x + 1). On [1, 2] t is
# at most 1/3 and the error 2e-7.
_LOG2 = tuple(2.8853900817779268 / n for n in (1, 3, 5, 7, 9, 11))

_FAR = -125.0  # the smaller state weighs at least 2**_FAR of the other one, never 0

# (2**f - 1) / f on [-0.5, 0.5]: Taylor, relative error 2e-8.
_EXP2_LESS_ONE = tuple(math.log(2) ** n / math.factorial(n) for n in range(1, 9))
_TANH_ONE = 40.0  # tanh(x) is 1 in float32 where 2 * x * log2(e) is beyond it


def inverse_total(total):
    """``1 / total``; 1 for a row that has seen nothing, whose columns are 0; NaN for NaN."""
    return T.Select(total < T.float32(NO_SUM), T.float32(1), T.float32(1) / total)


def with_sink(sink, top, total, arithmetic) -> tuple:
    """Let a sink into the softmax of a row: its maximum, the factor of its sums, and its sum.

    A sink joins the sum alone. `sink`, in the exp2 domain, may be -inf: none. One that is NaN or
    +inf makes the sum NaN. `arithmetic` is `cpu.simd` or `gpu.isa`.
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


class MergedLse:
    """The merged lse of two partial states of a row, and the weight of each: vectors of float32.

    The states ``(o, lse)`` are those of disjoint positions. A weight is 0 for an lse of -inf only,
    so NaN in the o of a state that has seen something is kept. An lse of NaN or +inf makes all of
    them NaN.
    `arithmetic` is `cpu.simd`, or `gpu.isa` for one lane.
    """

    def __init__(self, a, b, lanes: int, arithmetic):
        a, b = arithmetic.temp(a, lanes), arithmetic.temp(b, lanes)
        zero, one = (arithmetic.constant(x, lanes) for x in (0.0, 1.0))
        lowest = arithmetic.constant(-3.0e38, lanes)
        top = arithmetic.temp(T.max(a, b), lanes)
        base = arithmetic.temp(T.max(top, lowest), lanes)  # finite, so that -inf - base is not NaN
        far, minimum = (arithmetic.constant(x, lanes) for x in (_FAR, 2.0**_FAR))

        def power_of(x):
            distance = arithmetic.temp(x - base, lanes)
            power = T.Select(distance < far, minimum, arithmetic.exp2(distance, lanes))
            return arithmetic.temp(T.Select(x < lowest, zero, power), lanes)

        powers = [power_of(x) for x in (a, b)]
        total = arithmetic.temp(powers[0] + powers[1], lanes)
        empty = total == zero  # it is at least 1 otherwise, or NaN
        inverse = arithmetic.temp(one / T.Select(empty, one, total), lanes)
        self.weights = [arithmetic.temp(power * inverse, lanes) for power in powers]
        self.lse = arithmetic.temp(
            T.Select(empty, top, base + _log2(total, lanes, arithmetic)), lanes
        )


def _log2(x, lanes: int, arithmetic):
    """Base-2 logarithm of values in [1, 2]."""
    one = arithmetic.constant(1.0, lanes)
    t = arithmetic.temp((x - one) / (x + one), lanes)
    square = arithmetic.temp(t * t, lanes)
    value = arithmetic.constant(_LOG2[-1], lanes)
    for c in reversed(_LOG2[:-1]):
        value = value * square + arithmetic.constant(c, lanes)
    return value * t


def selected(value, weight, lanes: int, arithmetic):
    """``value * weight``, and zero where the weight is zero, whatever the value is."""
    weight, zero = arithmetic.broadcast(weight, lanes), arithmetic.constant(0.0, lanes)
    return arithmetic.temp(T.Select(weight == zero, zero, value * weight), lanes)


def soft_cap(score, cap: float | None, lanes: int, arithmetic):
    """Cap a vector of scores, which are logits times log2(e): ``cap * tanh(x / cap)``.

    ``tanh(x) = e / (e + 2)`` for ``e = exp(2 * x) - 1``, and e is computed without cancellation, so
    that small scores keep their relative accuracy of a few float32 roundings. Infinite scores
    become the cap, NaN stays NaN. `arithmetic` is `cpu.isa.simd`, or the
    instructions of a GPU for one lane.
    """
    if cap is None:
        return score
    int_type, float_type = vector_type("int32", lanes), vector_type(F32, lanes)
    constant, temp = arithmetic.constant, arithmetic.temp
    power = temp(score * constant(2 / cap, lanes), lanes)
    power = arithmetic.at_least(arithmetic.at_most(power, _TANH_ONE, lanes), -_TANH_ONE, lanes)
    power = temp(power, lanes)
    whole = temp(arithmetic.rint(power, lanes), lanes)
    fraction = temp(power - whole, lanes)
    less_one = constant(_EXP2_LESS_ONE[-1], lanes)
    for c in reversed(_EXP2_LESS_ONE[:-1]):
        less_one = less_one * fraction + constant(c, lanes)
    less_one = temp(less_one * fraction, lanes)
    exponent = T.cast(whole, int_type) + arithmetic.broadcast(T.int32(127), lanes)
    exponent = T.shift_left(exponent, arithmetic.broadcast(T.int32(23), lanes))
    scale = temp(T.reinterpret(float_type, exponent), lanes)
    e = temp(scale * less_one + (scale - constant(1.0, lanes)), lanes)
    return temp(constant(cap * LOG2E, lanes) * e / (e + constant(2.0, lanes)), lanes)
