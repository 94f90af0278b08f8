# SPDX-License-Identifier: Apache-2.0
"""CPU kernels around a recurrence: what it takes, from projections, and what its output becomes."""

from __future__ import annotations

import math

from tvm import tirx
from tvm.script import tirx as T

from tir_kernels.cpu.isa.simd import (
    Register,
    add,
    broadcast,
    constant,
    load,
    reduce_lanes,
    store,
    temp,
)
from tir_kernels.spec import VectorTarget
from tvm_pagedkv.config import RecurrentConfig

from .emit import parallel_if, rows_kernel
from .row_kernels import PARALLEL_ELEMENTS, sigmoid

_L2_EPSILON = 1e-6


def delta_inputs(spec: RecurrentConfig, dtype: str, target: VectorTarget) -> tirx.PrimFunc:
    """Build the kernel that makes the arguments of a gated delta rule.

    Q and K get a norm of 1 in every head, ``beta = sigmoid(b)`` and
    ``log_decay = -exp(a_log) * softplus(a + dt_bias)``.

    Arguments of the kernel: mixed [n, 2 * num_key_heads * key_dim + num_heads * value_dim] (Q, K
    and V), gates float32 [n, 2 * num_heads] (b, a), a_log and dt_bias float32 [num_heads], then q
    and k [n, num_key_heads, key_dim], v [n, num_heads, value_dim], log_decay and beta float32
    [n, num_heads].
    """
    num_heads, _, _, _, width = widths(spec)

    def body(n, mixed, gates, a_log, dt_bias, q, k, v, log_decay, beta):
        def row(i):
            keys_and_values(spec, mixed, i, (q, k, v), target)
            with T.serial(T.int64(num_heads)) as head:
                b, a = gates[i, head], gates[i, head + num_heads]
                T.buffer_store(beta, rate(b), [i, head])
                step = softplus(temp(a + dt_bias[head]))
                decay = T.float32(0.0) - T.exp(a_log[head]) * step
                T.buffer_store(log_decay, decay, [i, head])

        parallel_if(n * width >= PARALLEL_ELEMENTS, n, row)

    def arguments(n):
        return [
            ("mixed", (n, width), dtype),
            ("gates", (n, 2 * num_heads), "float32"),
            ("a_log", (num_heads,), "float32"),
            ("dt_bias", (num_heads,), "float32"),
            *_outputs(n, spec, dtype),
            ("log_decay", (n, num_heads), "float32"),
            ("beta", (n, num_heads), "float32"),
        ]

    return rows_kernel(arguments, body, target)


def mamba2_inputs(
    spec: RecurrentConfig, limit: tuple[float, float], dtype: str, target: VectorTarget
) -> tirx.PrimFunc:
    """Build the kernel that makes the arguments of a Mamba2 recurrence.

    With ``step = clamp(softplus(dt + dt_bias), *limit)``: ``v = step * x``, ``k = B``, ``q = C``
    and ``log_decay = -exp(a_log) * step``.

    Arguments of the kernel: mixed [n, num_heads * value_dim + 2 * num_key_heads * key_dim] (x, B
    and C), steps float32 [n, num_heads], a_log and dt_bias float32 [num_heads], then q and k
    [n, num_key_heads, key_dim], v [n, num_heads, value_dim], log_decay float32 [n, num_heads].
    """
    num_heads, key_dim, key_width, v_width, width = widths(spec)
    lanes = math.gcd(spec.value_dim, target.lanes)

    def body(n, mixed, steps, a_log, dt_bias, q, k, v, log_decay):
        def row(i):
            _copy(mixed, i, v_width, k, spec.num_key_heads, key_dim, target)
            _copy(mixed, i, v_width + key_width, q, spec.num_key_heads, key_dim, target)
            with T.serial(T.int64(num_heads)) as head:
                step = softplus(temp(steps[i, head] + dt_bias[head]))
                if limit[0] > 0:
                    step = T.max(step, T.float32(limit[0]))
                if math.isfinite(limit[1]):
                    step = T.min(step, T.float32(limit[1]))
                step = temp(step)
                decay = T.float32(0.0) - T.exp(a_log[head]) * step
                T.buffer_store(log_decay, decay, [i, head])
                with T.serial(T.int64(spec.value_dim // lanes)) as j:
                    x = load(mixed, [i, head * spec.value_dim + j * lanes], lanes)
                    store(v, [i, head, j * lanes], lanes, x * broadcast(step, lanes))

        parallel_if(n * width >= PARALLEL_ELEMENTS, n, row)

    def arguments(n):
        return [
            ("mixed", (n, width), dtype),
            ("steps", (n, num_heads), "float32"),
            ("a_log", (num_heads,), "float32"),
            ("dt_bias", (num_heads,), "float32"),
            *_outputs(n, spec, dtype),
            ("log_decay", (n, num_heads), "float32"),
        ]

    return rows_kernel(arguments, body, target)


def gated_norm(
    heads: tuple[int, int],
    num_groups: int,
    norm: str | None,
    epsilon: float,
    dtype: str,
    target: VectorTarget,
    *,
    shares_weight: bool = False,
    skip_width: int = 0,
    activation: str = "silu",
) -> tirx.PrimFunc:
    """Build the kernel of the gate and the norm behind a recurrence.

    Parameters
    ----------
    heads : (int, int)
        Number of heads and their width.
    num_groups : int
        Number of parts of a row that are normalized by themselves, each of which has whole heads.
    norm : {"gate_first", "gate_last"}, optional
        Whether ``activation(gate)`` multiplies before or after the RMS norm; None: there is none.
    epsilon : float
    shares_weight : bool
        Whether all groups have the same weights.
    skip_width : int
        If not 0, ``d * x`` is added to o first, where x is the beginning of rows of this width.
    activation : {"silu", "sigmoid"}

    Arguments of the kernel: o [n, features], gate [n, features], where chosen x [n, skip_width] and
    d float32 [heads], with a norm its weight float32 [features or those of a group], out
    [n, features].
    """
    num_heads, head_dim = heads
    features, heads_per_group = num_heads * head_dim, num_heads // num_groups
    width = features // num_groups
    lanes = math.gcd(head_dim, target.lanes)

    def body(n, o, gate, *others_and_out):
        *others, out = others_and_out
        skipped = others[:2] if skip_width else None
        weight = others[-1] if norm else None

        def gate_at(i, column):
            if activation == "silu":
                return silu_at(gate, [i, column], lanes)
            return sigmoid(temp(load(gate, [i, column], lanes), lanes), lanes)

        def row(i):
            values = T.alloc_buffer((width,), "float32")
            with T.serial(T.int64(num_groups)) as group:
                squares = Register(lanes, init=constant(0.0, lanes))
                with T.serial(T.int64(heads_per_group)) as head:
                    with T.serial(T.int64(head_dim // lanes)) as j:
                        at = head * head_dim + j * lanes
                        column = group * width + at
                        value = load(o, [i, column], lanes)
                        if skipped:
                            x, d = skipped
                            factor = broadcast(d[group * heads_per_group + head], lanes)
                            value = value + load(x, [i, column], lanes) * factor
                        if norm != "gate_last":
                            value = value * gate_at(i, column)
                        value = temp(value, lanes)
                        squares.fma(value, value)
                        store(values, [at], lanes, value)
                scale = T.float32(1.0)
                if norm:
                    mean = reduce_lanes(squares.get(), lanes, add) / T.float32(width)
                    scale = temp(T.float32(1.0) / T.sqrt(mean + T.float32(epsilon)))
                with T.serial(T.int64(width // lanes)) as j:
                    column = group * width + j * lanes
                    value = load(values, [j * lanes], lanes) * broadcast(scale, lanes)
                    if norm:
                        at = j * lanes if shares_weight else column
                        value = value * load(weight, [at], lanes)
                    if norm == "gate_last":
                        value = value * gate_at(i, column)
                    store(out, [i, column], lanes, value)

        parallel_if(n * features >= PARALLEL_ELEMENTS, n, row)

    def arguments(n):
        rows = (n, features)
        skipped = [("x", (n, skip_width), dtype), ("d", (num_heads,), "float32")]
        weights = (width if shares_weight else features,)
        return [
            ("o", rows, dtype),
            ("gate", rows, dtype),
            *(skipped if skip_width else []),
            *([("weight", weights, "float32")] if norm else []),
            ("out", rows, dtype),
        ]

    return rows_kernel(arguments, body, target)


def silu_at(gate, at: list, lanes: int):
    """Return ``z * sigmoid(z)`` of columns of a row of the gate."""
    z = temp(load(gate, at, lanes), lanes)
    return z * sigmoid(z, lanes)


def keys_and_values(spec: RecurrentConfig, mixed, i, outs: tuple, target: VectorTarget) -> None:
    """Write Q, K and V of row i to heads; those of Q and K get a norm of 1."""
    num_heads, key_dim, key_width, _, _ = widths(spec)
    lanes, (*keys, v) = math.gcd(key_dim, target.lanes), outs
    for out, begin in zip(keys, (0, key_width), strict=True):
        with T.serial(T.int64(spec.num_key_heads)) as head:
            _scale_to_one(mixed, i, head * key_dim + begin, out, head, key_dim, lanes)
    _copy(mixed, i, 2 * key_width, v, num_heads, spec.value_dim, target)


def rate(b):
    """Return the sigmoid of a number."""
    return T.float32(1.0) / (T.float32(1.0) + T.exp(T.float32(0.0) - b))


def softplus(x):
    """Return log(1 + exp(x)) without overflow."""
    zero = T.float32(0.0)
    return T.max(x, zero) + T.log1p(T.exp(T.min(x, zero - x)))


def widths(spec: RecurrentConfig) -> tuple[int, int, int, int, int]:
    """Return heads, the width of a key, of all keys, of V, and of Q, K and V."""
    key_width, v_width = spec.num_key_heads * spec.key_dim, spec.num_heads * spec.value_dim
    return spec.num_heads, spec.key_dim, key_width, v_width, 2 * key_width + v_width


def _outputs(n, spec: RecurrentConfig, dtype: str) -> list[tuple]:
    keys = (n, spec.num_key_heads, spec.key_dim)
    values = (n, spec.num_heads, spec.value_dim)
    return [("q", keys, dtype), ("k", keys, dtype), ("v", values, dtype)]


def _copy(source, row, begin: int, out, num_heads: int, width: int, target: VectorTarget) -> None:
    """Copy columns of a row to heads."""
    lanes = math.gcd(width, target.lanes)
    with T.serial(T.int64(num_heads)) as head, T.serial(T.int64(width // lanes)) as j:
        value = load(source, [row, head * width + j * lanes + begin], lanes)
        store(out, [row, head, j * lanes], lanes, value)


def _scale_to_one(source, row, begin, out, head, width: int, lanes: int) -> None:
    """Write columns of a row to a head, divided by the root of the sum of their squares."""
    squares = Register(lanes, init=constant(0.0, lanes))
    with T.serial(T.int64(width // lanes)) as j:
        value = temp(load(source, [row, j * lanes + begin], lanes), lanes)
        squares.fma(value, value)
    total = reduce_lanes(squares.get(), lanes, add)
    scale = temp(T.float32(1.0) / T.sqrt(total + T.float32(_L2_EPSILON)))
    with T.serial(T.int64(width // lanes)) as j:
        value = load(source, [row, j * lanes + begin], lanes) * broadcast(scale, lanes)
        store(out, [row, head, j * lanes], lanes, value)
