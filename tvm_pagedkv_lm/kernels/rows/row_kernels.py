# SPDX-License-Identifier: Apache-2.0
"""CPU kernels of a decoder that work row by row: norms, gates, soft-cap, ..."""

from __future__ import annotations

import math
from collections.abc import Callable

from tvm import tirx
from tvm.script import tirx as T

from tir_kernels.cpu.isa.simd import (
    Register,
    add,
    broadcast,
    constant,
    exp2,
    load,
    reduce_lanes,
    store,
    temp,
)
from tir_kernels.cpu.softmax.logits import soft_cap
from tir_kernels.spec import LOG2E, VectorTarget

from ...config.query_scale import QueryScale
from .emit import built_once, parallel_if, rows_kernel

PARALLEL_ELEMENTS = 1 << 15  # below: cheaper than waking the other threads


@built_once
def norm(
    features: int,
    epsilon: float,
    dtype: str,
    target: VectorTarget,
    *,
    residual: bool = False,
    scaled: bool = False,
    subtracts_mean: bool = False,
) -> tirx.PrimFunc:
    """Build the kernel of ``x / sqrt(mean(x ** 2) + epsilon) * weight (+ residual) (* scale)``.

    A layer norm first subtracts the mean from x.

    Arguments of the kernel: x [n, features], weight float32 [features], residual [n, features] and
    scale float32 [1] where chosen, out [n, features].
    """

    def body(n, x, weight, *others):
        *chosen, out = others
        added = chosen[0] if residual else None

        def row(i):
            how = (features, epsilon, target)
            normalize(
                (x, weight, out), i, 0, how, added,
                subtracts_mean=subtracts_mean, factor=chosen[-1][0] if scaled else None,
            )  # fmt: skip

        parallel_if(n * features >= PARALLEL_ELEMENTS, n, row)

    def arguments(n):
        rows = (n, features)
        return [
            ("x", rows, dtype),
            ("weight", (features,), "float32"),
            *([("residual", rows, dtype)] if residual else []),
            *([("scale", (1,), "float32")] if scaled else []),
            ("out", rows, dtype),
        ]

    return rows_kernel(arguments, body, target)


@built_once
def qk_norm(
    q: tuple[int, int],
    k: tuple[int, int],
    v_width: int,
    epsilon: float,
    dtype: str,
    target: VectorTarget,
    *,
    v: str = "as_is",
) -> tirx.PrimFunc:
    """RMS norms of the Q and K of fused rows, and of V where chosen.

    Parameters
    ----------
    q, k : (count, width)
        Parts that are normalized by themselves, with the same weights, and how wide each is: the
        heads, or one part that holds them all.
    v : {"as_is", "unit", "unit_of_k"}
        V is copied, or normalized in parts like those of K, but without weights. "unit_of_k": x has
        no V, which is K with the norm of V.

    Arguments of the kernel: x [n, width of Q, K and V], weights of Q and of K float32 [width of a
    part], out [n, width of Q, K and V].
    """
    (num_q, q_width), (num_k, k_width) = q, k
    k_begin = num_q * q_width
    v_begin = k_begin + num_k * k_width
    features = v_begin + v_width
    v_source = k_begin if v == "unit_of_k" else v_begin
    lanes = math.gcd(v_width, target.lanes)

    def normalize_v(x, out, i):
        with T.serial(T.int64(num_k)) as part:
            begin, to = part * k_width + v_source, part * k_width + v_begin
            normalize((x, None, out), i, begin, (k_width, epsilon, target), to=to)

    def copy_v(x, out, i):
        with T.serial(T.int64(v_width // lanes)) as j:
            at = [i, j * lanes + v_begin]
            store(out, at, lanes, load(x, at, lanes))

    def body(n, x, q_weight, k_weight, out):
        def row(i):
            with T.serial(T.int64(num_q)) as part:
                normalize((x, q_weight, out), i, part * q_width, (q_width, epsilon, target))
            with T.serial(T.int64(num_k)) as part:
                begin = part * k_width + k_begin
                normalize((x, k_weight, out), i, begin, (k_width, epsilon, target))
            (copy_v if v == "as_is" else normalize_v)(x, out, i)

        parallel_if(n * features >= PARALLEL_ELEMENTS, n, row)

    def arguments(n):
        return [
            ("x", (n, v_begin if v == "unit_of_k" else features), dtype),
            ("q_weight", (q_width,), "float32"),
            ("k_weight", (k_width,), "float32"),
            ("out", (n, features), dtype),
        ]

    return rows_kernel(arguments, body, target)


def normalize(
    buffers,
    row,
    begin,
    how,
    residual=None,
    *,
    bias=None,
    subtracts_mean=False,
    to=None,
    factor=None,
) -> None:
    """Norm of columns of a row: (x, weight, out), and (width, epsilon, target).

    Weights that are None are ones. The result is written to the columns from `to` on, by default
    those that were read, and is multiplied by `factor` at last.
    """
    (x, weight, out), (width, epsilon, target) = buffers, how
    lanes = math.gcd(width, target.lanes)
    shift = None
    if subtracts_mean:
        total = Register(lanes, init=constant(0.0, lanes))
        one = constant(1.0, lanes)
        with T.serial(T.int64(width // lanes)) as j:
            total.fma(load(x, [row, j * lanes + begin], lanes), one)
        shift = temp(reduce_lanes(total.get(), lanes, add) / T.float32(width))

    def centered(value):
        return value if shift is None else value - broadcast(shift, lanes)

    squares = Register(lanes, init=constant(0.0, lanes))
    with T.serial(T.int64(width // lanes)) as j:
        value = temp(centered(load(x, [row, j * lanes + begin], lanes)), lanes)
        squares.fma(value, value)
    mean = reduce_lanes(squares.get(), lanes, add) / T.float32(width)
    scale = temp(T.float32(1.0) / T.sqrt(mean + T.float32(epsilon)))
    with T.serial(T.int64(width // lanes)) as j:
        at = [row, j * lanes + begin]
        value = centered(load(x, at, lanes)) * broadcast(scale, lanes)
        if weight is not None:
            value = value * load(weight, [j * lanes], lanes)
        if bias is not None:
            value = value + load(bias, [j * lanes], lanes)
        if residual is not None:
            value = value + load(residual, at, lanes)
        if factor is not None:
            value = value * broadcast(factor, lanes)
        store(out, at if to is None else [row, j * lanes + to], lanes, value)


@built_once
def gated(
    activation: str,
    features: int,
    dtype: str,
    target: VectorTarget,
    *,
    deviations: float | None = None,
) -> tirx.PrimFunc:
    """``activation(gate) * up`` for x [n, 2 * features]: gate, then up; out [n, features].

    Parameters
    ----------
    activation : {"silu", "gelu_tanh", "identity"}
        As for `activate`.
    deviations : float, optional
        The gate is first reduced by the mean of its row and so many standard deviations, and what
        is negative then becomes zero.
    """
    lanes = math.gcd(features, target.lanes)

    def product(gate, up):
        return activate(activation, gate, lanes) * up

    def cutoff(x, i):
        assert deviations is not None
        total, squares = (Register(lanes, init=constant(0.0, lanes)) for _ in range(2))
        one = constant(1.0, lanes)
        with T.serial(T.int64(features // lanes)) as j:
            total.fma(load(x, [i, j * lanes], lanes), one)
        mean = temp(reduce_lanes(total.get(), lanes, add) / T.float32(features))
        with T.serial(T.int64(features // lanes)) as j:
            value = temp(load(x, [i, j * lanes], lanes) - broadcast(mean, lanes), lanes)
            squares.fma(value, value)
        variance = reduce_lanes(squares.get(), lanes, add) / T.float32(features)
        return temp(mean + T.float32(deviations) * T.sqrt(variance))

    return _gated(product, features, dtype, target, None if deviations is None else cutoff)


def activate(activation: str, x, lanes: int):
    """Return an activation of x, which is not an expression to be repeated.

    "silu" and "gelu_tanh" are ``x * sigmoid(z)``: of z = x, and of
    z = sqrt(8 / pi) * (x + 0.044715 * x ** 3). "identity" is x.
    """
    if activation == "identity":
        return x
    if activation == "silu":
        return x * sigmoid(x, lanes)
    factor = math.sqrt(8 / math.pi)
    cubic = constant(0.044715 * factor, lanes) * x * x
    return x * sigmoid(temp(x * (cubic + constant(factor, lanes)), lanes), lanes)


def clamped_gated(
    factor: float, limit: float, features: int, dtype: str, target: VectorTarget
) -> tirx.PrimFunc:
    """``g * sigmoid(factor * g) * (u + 1)`` for x [n, 2 * features]: gate, then up.

    g is the gate up to `limit`, and u is up within `limit` on both sides of zero.
    """
    lanes = math.gcd(features, target.lanes)

    def product(gate, up):
        bound = constant(limit, lanes)
        gate = temp(T.min(gate, bound), lanes)
        up = T.max(T.min(up, bound), constant(-limit, lanes))
        gate = gate * sigmoid(temp(gate * constant(factor, lanes), lanes), lanes)
        return gate * (up + constant(1.0, lanes))

    return _gated(product, features, dtype, target)


def _gated(
    product: Callable,
    features: int,
    dtype: str,
    target: VectorTarget,
    cutoff: Callable | None = None,
) -> tirx.PrimFunc:
    """``product(gate, up)`` for x [n, 2 * features]: gate, then up; out [n, features].

    With ``cutoff(x, row)`` the gate is what exceeds this number.
    """
    lanes = math.gcd(features, target.lanes)

    def body(n, x, out):
        def row(i):
            limit = None if cutoff is None else cutoff(x, i)
            with T.serial(T.int64(features // lanes)) as j:
                gate = load(x, [i, j * lanes], lanes)
                if limit is not None:
                    gate = T.max(gate - broadcast(limit, lanes), constant(0.0, lanes))
                gate = temp(gate, lanes)
                up = load(x, [i, j * lanes + features], lanes)
                store(out, [i, j * lanes], lanes, product(gate, up))

        parallel_if(n * features >= PARALLEL_ELEMENTS, n, row)

    def arguments(n):
        return [("x", (n, 2 * features), dtype), ("out", (n, features), dtype)]

    return rows_kernel(arguments, body, target)


def sigmoid(z, lanes: int):
    """Return p / (1 + e) with e = exp(-|z|) and p = 1 or e by the sign of z."""
    zero, one = constant(0.0, lanes), constant(1.0, lanes)
    decay = temp(exp2(T.min(z, zero - z) * constant(LOG2E, lanes), lanes), lanes)
    return T.Select(z >= zero, one, decay) / (one + decay)


def multiply(activation: str, features: int, dtype: str, target: VectorTarget) -> tirx.PrimFunc:
    """``x * activation(gate)`` for x, gate and out [n, features]: "sigmoid" or "identity"."""
    lanes = math.gcd(features, target.lanes)

    def body(n, x, gate, out):
        def row(i):
            with T.serial(T.int64(features // lanes)) as j:
                at = [i, j * lanes]
                factor = load(gate, at, lanes)
                if activation == "sigmoid":
                    factor = sigmoid(temp(factor, lanes), lanes)
                store(out, at, lanes, load(x, at, lanes) * factor)

        parallel_if(n * features >= PARALLEL_ELEMENTS, n, row)

    def arguments(n):
        return [(name, (n, features), dtype) for name in ("x", "gate", "out")]

    return rows_kernel(arguments, body, target)


def scale_queries(
    q_width: int, features: int, scale: QueryScale, dtype: str, target: VectorTarget
) -> tirx.PrimFunc:
    """Multiply the columns of Q of fused rows by a factor that grows with the position.

    Parameters
    ----------
    q_width, features : int
        Columns of Q, and of Q, K and V. Those of K and V are copied.
    scale : QueryScale

    Arguments of the kernel: x [n, features], positions int32 [n], out like x.
    """
    lanes = math.gcd(features - q_width, q_width, target.lanes)

    def body(n, x, positions, out):
        def row(i):
            steps = T.cast((positions[i] + scale.offset) // scale.floor + 1, "float32")
            share = temp(T.log(steps) * T.float32(scale.factor) + T.float32(1.0))
            with T.serial(T.int64(features // lanes)) as j:
                at = [i, j * lanes]
                by = T.if_then_else(j * lanes < q_width, share, T.float32(1.0))
                store(out, at, lanes, load(x, at, lanes) * broadcast(temp(by), lanes))

        parallel_if(n * features >= PARALLEL_ELEMENTS, n, row)

    def arguments(n):
        rows = ((name, (n, features), dtype) for name in ("x", "out"))
        return [next(rows), ("positions", (n,), "int32"), next(rows)]

    return rows_kernel(arguments, body, target)


def soft_cap_logits(features: int, cap: float, target: VectorTarget) -> tirx.PrimFunc:
    """``cap * tanh(x / cap)`` for x and out float32 [n, features]."""
    lanes = math.gcd(features, target.lanes)

    def body(n, x, out):
        def row(i):
            with T.serial(T.int64(features // lanes)) as j:
                # The fragment takes and gives logits times log2(e).
                score = load(x, [i, j * lanes], lanes) * constant(LOG2E, lanes)
                capped = soft_cap(score, cap, lanes) * constant(1 / LOG2E, lanes)
                store(out, [i, j * lanes], lanes, capped)

        parallel_if(n * features >= PARALLEL_ELEMENTS, n, row)

    def arguments(n):
        return [("x", (n, features), "float32"), ("out", (n, features), "float32")]

    return rows_kernel(arguments, body, target)


def take_rows(features: int, dtype: str, target: VectorTarget) -> tirx.PrimFunc:
    """``out = x[rows]`` for x [n, features], rows int32 [b], out [b, features]."""
    lanes = math.gcd(features, target.lanes)

    def body(n, x, rows, out):
        with T.serial(rows.shape[0]) as i, T.serial(T.int64(features // lanes)) as j:
            value = load(x, [T.cast(rows[i], "int64"), j * lanes], lanes)
            store(out, [i, j * lanes], lanes, value)

    def arguments(n):
        b = T.int64()
        return [
            ("x", (n, features), dtype),
            ("rows", (b,), "int32"),
            ("out", (b, features), dtype),
        ]

    return rows_kernel(arguments, body, target)
