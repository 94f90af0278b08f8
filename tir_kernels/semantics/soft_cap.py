# SPDX-License-Identifier: Apache-2.0
"""The soft-cap of logits, with small relative errors."""

from __future__ import annotations

import math

from tvm.script import tirx as T

from ..spec import LOG2E
from ..vectors import F32, vector_type

# (2**f - 1) / f on [-0.5, 0.5]: Taylor, relative error 2e-8.
_COEFFICIENTS = tuple(math.log(2) ** n / math.factorial(n) for n in range(1, 9))
_LIMIT = 40.0  # tanh(x) is 1 in float32 where 2 * x * log2(e) is beyond it


def soft_cap(score, cap: float | None, lanes: int, arithmetic):
    """Cap a vector of scores, which are logits times log2(e): ``cap * tanh(x / cap)``.

    ``tanh(x) = e / (e + 2)`` for ``e = exp(2 * x) - 1``, and e is computed without cancellation, so
    that small scores keep their relative accuracy of a few float32 roundings. Infinite scores
    become the cap, NaN stays NaN. `arithmetic` is `cpu.simd`, or `cuda.scalars` for one lane.
    """
    if cap is None:
        return score
    int_type, float_type = vector_type("int32", lanes), vector_type(F32, lanes)
    constant, temp = arithmetic.constant, arithmetic.temp
    power = temp(score * constant(2 / cap, lanes), lanes)
    power = arithmetic.at_least(arithmetic.at_most(power, _LIMIT, lanes), -_LIMIT, lanes)
    power = temp(power, lanes)
    whole = temp(arithmetic.rint(power, lanes), lanes)
    fraction = temp(power - whole, lanes)
    less_one = constant(_COEFFICIENTS[-1], lanes)
    for c in reversed(_COEFFICIENTS[:-1]):
        less_one = less_one * fraction + constant(c, lanes)
    less_one = temp(less_one * fraction, lanes)
    exponent = T.cast(whole, int_type) + arithmetic.broadcast(T.int32(127), lanes)
    exponent = T.shift_left(exponent, arithmetic.broadcast(T.int32(23), lanes))
    scale = temp(T.reinterpret(float_type, exponent), lanes)
    e = temp(scale * less_one + (scale - constant(1.0, lanes)), lanes)
    return temp(constant(cap * LOG2E, lanes) * e / (e + constant(2.0, lanes)), lanes)
