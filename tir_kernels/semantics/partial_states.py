# SPDX-License-Identifier: Apache-2.0
"""The merge of two partial states ``(o, lse)`` of a row over disjoint positions."""

from __future__ import annotations

from tvm.script import tirx as T

# log2(x) is the sum of these times t, t^3, t^5, ... with t = (x - 1) / (x + 1). On [1, 2] t is
# at most 1/3 and the error 2e-7.
_LOG2 = tuple(2.8853900817779268 / n for n in (1, 3, 5, 7, 9, 11))

_FAR = -125.0  # the smaller state weighs at least 2**_FAR of the other one, never 0


class MergedLse:
    """The merged lse of two partial states, and the weight of each: vectors of float32.

    A weight is 0 for an lse of -inf only, so NaN in the o of a state that has seen something is
    kept. An lse of NaN or +inf makes all of them NaN.
    `arithmetic` is `cpu.simd`, or `cuda.scalars` for one lane.
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
