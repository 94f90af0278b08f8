# SPDX-License-Identifier: Apache-2.0
"""The CPU kernel that makes what a delta rule takes whose channels decay by themselves."""

from __future__ import annotations

import math

from tvm import tirx
from tvm.script import tirx as T

from tir_kernels.cpu.isa import simd
from tir_kernels.cpu.isa.simd import broadcast, constant, load, store, temp
from tir_kernels.semantics.decay import exp
from tir_kernels.spec import VectorTarget
from tvm_pagedkv.config import RecurrentConfig

from .emit import built_once, parallel_if, rows_kernel
from .row_kernels import PARALLEL_ELEMENTS
from .state_kernels import keys_and_values, rate, widths

_SERIES_TERMS = 8  # of log1p, whose rest is below 2e-9


@built_once
def kimi_inputs(spec: RecurrentConfig, dtype: str, target: VectorTarget) -> tirx.PrimFunc:
    """Build the kernel that makes the arguments of the delta rule of Kimi Linear.

    Q and K get a norm of 1 in every head, ``beta = sigmoid(b)`` and
    ``log_decay = -exp(a_log) * softplus(decays + dt_bias)`` in every channel.

    Arguments of the kernel: mixed [n, 2 * num_key_heads * key_dim + num_heads * value_dim] (Q, K
    and V), b float32 [n, num_heads], decays float32 [n, num_heads * key_dim], a_log float32
    [num_heads], dt_bias float32 [num_heads * key_dim], then q and k [n, num_key_heads, key_dim], v
    [n, num_heads, value_dim], log_decay float32 [n, num_heads, key_dim], beta float32
    [n, num_heads].
    """
    num_heads, key_dim, _, _, width = widths(spec)
    lanes = math.gcd(key_dim, target.lanes)
    channels = num_heads * key_dim

    def body(n, mixed, b, decays, a_log, dt_bias, q, k, v, log_decay, beta):
        def row(i):
            keys_and_values(spec, mixed, i, (q, k, v), target)
            with T.serial(T.int64(num_heads)) as head:
                T.buffer_store(beta, rate(b[i, head]), [i, head])
                factor = temp(T.float32(0.0) - T.exp(a_log[head]))
                with T.serial(T.int64(key_dim // lanes)) as j:
                    column = head * key_dim + j * lanes
                    value = load(decays, [i, column], lanes) + load(dt_bias, [column], lanes)
                    step = wide_softplus(temp(value, lanes), lanes)
                    store(log_decay, [i, head, j * lanes], lanes, step * broadcast(factor, lanes))

        parallel_if(n * (width + channels) >= PARALLEL_ELEMENTS, n, row)

    def arguments(n):
        keys = (n, spec.num_key_heads, key_dim)
        return [
            ("mixed", (n, width), dtype),
            ("b", (n, num_heads), "float32"),
            ("decays", (n, channels), "float32"),
            ("a_log", (num_heads,), "float32"),
            ("dt_bias", (channels,), "float32"),
            ("q", keys, dtype),
            ("k", keys, dtype),
            ("v", (n, num_heads, spec.value_dim), dtype),
            ("log_decay", (n, num_heads, key_dim), "float32"),
            ("beta", (n, num_heads), "float32"),
        ]

    return rows_kernel(arguments, body, target)


def wide_softplus(x, lanes: int):
    """Return log(1 + exp(x)) of a vector, to float32 rounding.

    With t = exp(-|x|) and s = t / (2 + t) it is ``max(x, 0) + 2 * (s + s**3 / 3 + ...)``.
    """
    zero, two = constant(0.0, lanes), constant(2.0, lanes)
    t = exp(temp(T.min(x, zero - x), lanes), lanes, simd)
    s = temp(t / (two + t), lanes)
    square = temp(s * s, lanes)
    series = constant(1.0 / (2 * _SERIES_TERMS - 1), lanes)
    for term in reversed(range(1, _SERIES_TERMS)):
        series = temp(series * square + constant(1.0 / (2 * term - 1), lanes), lanes)
    return temp(T.max(x, zero) + two * s * series, lanes)
