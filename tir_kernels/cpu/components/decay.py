# SPDX-License-Identifier: Apache-2.0
"""Decay of recurrent states: ``exp(g)``, accurate enough to be applied once a token."""

from __future__ import annotations

from tvm.script import tirx as T

from ...spec import LOG2E
from ..simd import F32, at_least, at_most, broadcast, constant, rint, temp, vector_type

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


def multiply_add(a, b, c, lanes: int):
    """``a * b + c``, rounded once where the CPU can.

    LLVM may fuse a sum of products as it likes, here and there differently. This intrinsic keeps
    the bits of a state independent of how its tokens are cut into calls.
    """
    return T.call_llvm_pure_intrin(vector_type(F32, lanes), "llvm.fmuladd", a, b, c)


def exp(x, lanes: int):
    """``exp(x)`` with a relative error of about ``1e-7 * max(1, abs(x))``; NaN stays NaN."""
    int_type, float_type = vector_type("int32", lanes), vector_type(F32, lanes)
    scaled = x * constant(LOG2E, lanes)
    x = temp(at_most(temp(at_least(scaled, -127.0, lanes), lanes), 127.0, lanes), lanes)
    whole = temp(rint(x, lanes), lanes)
    fraction = temp(x - whole, lanes)
    power = constant(_COEFFICIENTS[-1], lanes)
    for c in reversed(_COEFFICIENTS[:-1]):
        power = temp(multiply_add(power, fraction, constant(c, lanes), lanes), lanes)
    exponent = T.shift_left(T.cast(whole, int_type), broadcast(T.int32(23), lanes))
    return temp(T.reinterpret(float_type, T.reinterpret(int_type, power) + exponent), lanes)
