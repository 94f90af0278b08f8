# SPDX-License-Identifier: Apache-2.0
"""The CPU kernels of a decoder that treat each row by itself: RMS norm, SwiGLU, choice of rows."""

from __future__ import annotations

import math

from tvm import tirx
from tvm.script import tirx as T

from tir_kernels.cpu.simd import (
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
from tir_kernels.spec import LOG2E, VectorTarget

from .emit import parallel_if, rows_kernel

_PARALLEL_ELEMENTS = 1 << 15  # below: cheaper than waking the other threads


def rms_norm(features: int, epsilon: float, dtype: str, target: VectorTarget) -> tirx.PrimFunc:
    """``x / sqrt(mean(x ** 2) + epsilon) * weight`` for x [n, features], weight [features]."""
    lanes = math.gcd(features, target.lanes)

    def body(n, x, weight, out):
        def row(i):
            squares = Register(lanes, init=constant(0.0, lanes))
            with T.serial(T.int64(features // lanes)) as j:
                value = temp(load(x, [i, j * lanes], lanes), lanes)
                squares.fma(value, value)
            mean = reduce_lanes(squares.get(), lanes, add) / T.float32(features)
            scale = temp(T.float32(1.0) / T.sqrt(mean + T.float32(epsilon)))
            with T.serial(T.int64(features // lanes)) as j:
                value = load(x, [i, j * lanes], lanes) * broadcast(scale, lanes)
                value = value * load(weight, [j * lanes], lanes)
                store(out, [i, j * lanes], lanes, value)

        parallel_if(n * features >= _PARALLEL_ELEMENTS, n, row)

    def arguments(n):
        rows = (n, features)
        return [("x", rows, dtype), ("weight", (features,), dtype), ("out", rows, dtype)]

    return rows_kernel(arguments, body, target)


def swiglu(features: int, dtype: str, target: VectorTarget) -> tirx.PrimFunc:
    """``silu(gate) * up`` for x [n, 2 * features] that holds gate, then up; out [n, features]."""
    lanes = math.gcd(features, target.lanes)

    def body(n, x, out):
        def row(i):
            with T.serial(T.int64(features // lanes)) as j:
                gate = temp(load(x, [i, j * lanes], lanes), lanes)
                up = load(x, [i, j * lanes + features], lanes)
                # sigmoid(g) is p / (1 + e) with e = exp(-|g|) and p = 1 or e by the sign of g.
                zero, one = constant(0.0, lanes), constant(1.0, lanes)
                decay = exp2(T.min(gate, zero - gate) * constant(LOG2E, lanes), lanes)
                part = T.Select(gate >= zero, one, decay)
                store(out, [i, j * lanes], lanes, gate * part / (one + decay) * up)

        parallel_if(n * features >= _PARALLEL_ELEMENTS, n, row)

    def arguments(n):
        return [("x", (n, 2 * features), dtype), ("out", (n, features), dtype)]

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
