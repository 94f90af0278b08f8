# SPDX-License-Identifier: Apache-2.0
"""Gates of rows: products with an activation, on any target."""

import math
from collections.abc import Callable

from tvm.script import tirx as T

from tir_kernels.script import inline, prim_func
from tir_kernels.spec import LOG2E
from tir_kernels.targets import row_worker

from ..define import Target, attributes, built_once, matcher


def sigmoid(z, v):
    """Return p / (1 + e) with e = exp(-|z|) and p = 1 or e by the sign of z.

    z is a vector of the `Vectors` v, and no expression to be repeated.
    """
    zero, one = v.constant(0.0), v.constant(1.0)
    power = v.arithmetic.exp2(T.min(z, zero - z) * v.constant(LOG2E), v.lanes)
    decay = v.arithmetic.temp(power, v.lanes)
    return T.Select(z >= zero, one, decay) / (one + decay)


def activate(activation: str, x, v):
    """Return an activation of x, a vector of v, which is no expression to be repeated.

    "silu" and "gelu_tanh" are ``x * sigmoid(z)``: of z = x, and of
    z = sqrt(8 / pi) * (x + 0.044715 * x ** 3). "sigmoid" is the sigmoid, "identity" is x.
    """
    if activation == "identity":
        return x
    if activation == "sigmoid":
        return sigmoid(x, v)
    if activation == "silu":
        return x * sigmoid(x, v)
    factor = math.sqrt(8 / math.pi)
    cubic = v.constant(0.044715 * factor) * x * x
    return x * sigmoid(v.arithmetic.temp(x * (cubic + v.constant(factor)), v.lanes), v)


@built_once
def gated(
    activation: str,
    features: int,
    dtype: str,
    target: Target,
    *,
    deviations: float | None = None,
):
    """Build the kernel of ``activation(gate) * up``.

    Parameters
    ----------
    activation : {"silu", "gelu_tanh", "identity"}
        As for `activate`.
    deviations : float, optional
        The gate is first reduced by the mean of its row and so many standard deviations, and what
        is negative then becomes zero.

    Arguments of the kernel: x [n, 2 * features], gate, then up; out [n, features].
    """

    def product(gate, up, v):
        return activate(activation, gate, v) * up

    return _gated(product, features, dtype, target, deviations)


@built_once
def clamped_gated(factor: float, limit: float, features: int, dtype: str, target: Target):
    """Build the kernel of ``g * sigmoid(factor * g) * (u + 1)``; arguments are those of `gated`.

    g is the gate up to `limit`, and u is up within `limit` on both sides of zero.
    """

    def product(gate, up, v):
        bound, temp = v.constant(limit), v.arithmetic.temp
        gate = temp(T.min(gate, bound), v.lanes)
        up = T.max(T.min(up, bound), v.constant(-limit))
        gate = gate * sigmoid(temp(gate * v.constant(factor), v.lanes), v)
        return gate * (up + v.constant(1.0))

    return _gated(product, features, dtype, target)


def _gated(
    product: Callable, features: int, dtype: str, target: Target, deviations: float | None = None
):
    """Build the kernel of ``product(gate, up, v)``, for vectors of v."""
    match_rows = matcher(target, dtype)

    @prim_func
    def gated(var_x: T.handle, var_out: T.handle):
        T.func_attr(attributes(target))
        n = T.int64()
        x = match_rows(var_x, n, 2 * features)
        out = match_rows(var_out, n, features)
        worker = row_worker(target)
        v = worker.vectors(features)
        for row in worker.items(n, features):
            if deviations is not None:
                cutoff = _Cutoff(v)
                cutoff.find(x, row, deviations)
            for column in v.columns():
                gate = v.load(x, (row, column))
                if deviations is not None:
                    gate = T.max(gate - v.filled(cutoff.value), v.constant(0.0))
                up = T.meta_var(v.load(x, (row, column + features)))
                v.store(out, (row, column), product(gate, up, v))

    return gated


@T.meta_class
class _Cutoff:
    """A number below which the gate of a row becomes zero."""

    def __init__(self, v):
        self.v, self.value = v, T.local_scalar("float32")

    @inline
    def find(self, x, row, deviations):
        """Take the mean of the gate plus so many standard deviations."""
        v = T.meta_var(self.v)
        total = v.constant(0.0)
        for column in v.columns():
            total += v.load(x, (row, column))
        mean = v.sum(total) / T.float32(v.width)
        squares = v.constant(0.0)
        for column in v.columns():
            value = v.load(x, (row, column)) - v.filled(mean)
            squares += value * value
        variance = T.meta_var(v.sum(squares) / T.float32(v.width))
        self.value = mean + T.float32(deviations) * T.sqrt(variance)


@built_once
def multiply(activation: str, features: int, dtype: str, target: Target):
    """Build the kernel of ``x * activation(gate)`` for x, gate and out [n, features].

    The activation is "sigmoid" or "identity".
    """
    match_rows = matcher(target, dtype)

    @prim_func
    def multiply(var_x: T.handle, var_gate: T.handle, var_out: T.handle):
        T.func_attr(attributes(target))
        n = T.int64()
        x = match_rows(var_x, n, features)
        gate = match_rows(var_gate, n, features)
        out = match_rows(var_out, n, features)
        worker = row_worker(target)
        v = worker.vectors(features)
        for row in worker.items(n, features):
            for column in v.columns():
                factor = v.load(gate, (row, column))
                value = T.meta_var(v.load(x, (row, column)) * activate(activation, factor, v))
                v.store(out, (row, column), value)

    return multiply
