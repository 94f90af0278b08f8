# SPDX-License-Identifier: Apache-2.0
"""Decay of recurrent states: ``exp(g)``, accurate enough to be applied once a token."""

from __future__ import annotations

from tvm.script import tirx as T

from ..spec import LOG2E
from ..vectors import F32, vector_type

# The polynomial of degree 6 with p(0) = 1 that is nearest to 2**f on [-0.5, 0.5] by relative error,
# which is below 2e-9: rounding decides. That of the softmax errs by 2.8e-6, which thousands of
# tokens would multiply.
_COEFFICIENTS = (
    1.0,
    0.6931472028550959,
    0.2402264791362764,
    0.05550332471041279,
    0.00961843735761305,
    0.0013398874452718867,
    0.000153533620058122,
)


def exp(x, lanes: int, arithmetic):
    """``exp(x)`` with a relative error of about ``1e-7 * max(1, abs(x))``; NaN stays NaN.

    `arithmetic` is `cpu.simd`, or `gpu.isa` for one lane.
    """
    int_type, float_type = vector_type("int32", lanes), vector_type(F32, lanes)
    temp, multiply_add = arithmetic.temp, arithmetic.multiply_add
    scaled = x * arithmetic.constant(LOG2E, lanes)
    x = temp(arithmetic.at_least(scaled, -127.0, lanes), lanes)
    x = temp(arithmetic.at_most(x, 127.0, lanes), lanes)
    whole = temp(arithmetic.rint(x, lanes), lanes)
    fraction = temp(x - whole, lanes)
    power = arithmetic.constant(_COEFFICIENTS[-1], lanes)
    for c in reversed(_COEFFICIENTS[:-1]):
        power = temp(multiply_add(power, fraction, arithmetic.constant(c, lanes), lanes), lanes)
    exponent = T.shift_left(T.cast(whole, int_type), arithmetic.broadcast(T.int32(23), lanes))
    return temp(T.reinterpret(float_type, T.reinterpret(int_type, power) + exponent), lanes)
