# SPDX-License-Identifier: Apache-2.0
"""CPU kernels around per-layer embeddings and the residual streams of AltUp.

Streams lie beside each other: a row of `num_streams` streams has ``num_streams * width`` features.
"""

from __future__ import annotations

import math

from tvm import tirx
from tvm.script import tirx as T

from tir_kernels.cpu.isa.simd import (
    F32,
    Register,
    broadcast,
    constant,
    load,
    reduce_lanes,
    store,
    temp,
)
from tir_kernels.cpu.isa.simd import add as plus
from tir_kernels.spec import VectorTarget

from .emit import built_once, parallel_if, rows_kernel
from .row_kernels import PARALLEL_ELEMENTS, activate, normalize, sigmoid

_SMALLEST = 1e-5  # mean square of a projected stream, as models were trained


@built_once
def take_columns(
    features: int,
    begin: int,
    width: int,
    dtype: str,
    target: VectorTarget,
    *,
    scaled: bool = False,
) -> tirx.PrimFunc:
    """``out = x[:, begin : begin + width] (* weight)``.

    Arguments of the kernel: x [n, features], weight float32 [width] where chosen, out [n, width].
    """
    lanes = math.gcd(width, target.lanes)

    def body(n, x, *weight_and_out):
        *weight, out = weight_and_out

        def row(i):
            with T.serial(T.int64(width // lanes)) as j:
                value = load(x, [i, j * lanes + begin], lanes)
                if scaled:
                    value = value * load(weight[0], [j * lanes], lanes)
                store(out, [i, j * lanes], lanes, value)

        parallel_if(n * width >= PARALLEL_ELEMENTS, n, row)

    def arguments(n):
        return [
            ("x", (n, features), dtype),
            *([("weight", (width,), F32)] if scaled else []),
            ("out", (n, width), dtype),
        ]

    return rows_kernel(arguments, body, target)


# --- per-layer embeddings -------------------------------------------------------------------------


@built_once
def ids_in_table(size: int, target: VectorTarget) -> tirx.PrimFunc:
    """Build the kernel that replaces ids from `size` on by 0: ids and out int32 [n]."""

    def body(n, ids, out):
        with T.serial(n) as i:
            T.buffer_store(out, T.if_then_else(ids[i] < size, ids[i], T.int32(0)), [i])

    def arguments(n):
        return [("ids", (n,), "int32"), ("out", (n,), "int32")]

    return rows_kernel(arguments, body, target)


@built_once
def join_inputs(
    hidden: int, parts: int, width: int, epsilon: float, dtype: str, target: VectorTarget
) -> tirx.PrimFunc:
    """Build the kernel that puts per-layer inputs behind the rows of a model.

    The input of a layer is a part of `width` columns: its norm of what x was projected to, plus its
    embedding, divided by the square root of 2.

    Arguments of the kernel: x [n, hidden], projected and embedded [n, parts * width], weight
    float32 [width], out [n, hidden + parts * width].
    """
    lanes, copied = math.gcd(width, target.lanes), math.gcd(hidden, target.lanes)

    def body(n, x, projected, embedded, weight, out):
        def row(i):
            with T.serial(T.int64(hidden // copied)) as j:
                at = [i, j * copied]
                store(out, at, copied, load(x, at, copied))
            with T.serial(T.int64(parts)) as part:
                begin, to = part * width, part * width + hidden
                normalize((projected, weight, out), i, begin, (width, epsilon, target), to=to)
                with T.serial(T.int64(width // lanes)) as j:
                    at = [i, to + j * lanes]
                    value = load(out, at, lanes) + load(embedded, [i, begin + j * lanes], lanes)
                    store(out, at, lanes, value * constant(math.sqrt(0.5), lanes))

        parallel_if(n * (hidden + parts * width) >= PARALLEL_ELEMENTS, n, row)

    def arguments(n):
        return [
            ("x", (n, hidden), dtype),
            ("projected", (n, parts * width), dtype),
            ("embedded", (n, parts * width), dtype),
            ("weight", (width,), F32),
            ("out", (n, hidden + parts * width), dtype),
        ]

    return rows_kernel(arguments, body, target)


@built_once
def activated_product(
    activation: str, width: int, features: int, begin: int, dtype: str, target: VectorTarget
) -> tirx.PrimFunc:
    """``activation(gate) * rows[:, begin : begin + width]``.

    Arguments of the kernel: gate [n, width], rows [n, features], out [n, width].
    """
    lanes = math.gcd(width, target.lanes)

    def body(n, gate, rows, out):
        def row(i):
            with T.serial(T.int64(width // lanes)) as j:
                at = [i, j * lanes]
                value = activate(activation, temp(load(gate, at, lanes), lanes), lanes)
                store(out, at, lanes, value * load(rows, [i, j * lanes + begin], lanes))

        parallel_if(n * width >= PARALLEL_ELEMENTS, n, row)

    def arguments(n):
        return [
            ("gate", (n, width), dtype),
            ("rows", (n, features), dtype),
            ("out", (n, width), dtype),
        ]

    return rows_kernel(arguments, body, target)


# --- streams --------------------------------------------------------------------------------------


@built_once
def stack_streams(num_streams: int, width: int, dtype: str, target: VectorTarget) -> tirx.PrimFunc:
    """Build the kernel that makes the streams: x, and what it was projected to.

    Each projected stream is scaled to the root mean square of x.

    Arguments of the kernel: x [n, width], projected [n, (num_streams - 1) * width], out [n,
    num_streams * width].
    """
    lanes = math.gcd(width, target.lanes)

    def body(n, x, projected, out):
        def row(i):
            with T.serial(T.int64(width // lanes)) as j:
                at = [i, j * lanes]
                store(out, at, lanes, load(x, at, lanes))
            size = temp(T.sqrt(_mean_square(x, i, 0, width, lanes)))
            with T.serial(T.int64(num_streams - 1)) as s:
                begin = s * width
                scale = _scale_to(size, projected, i, begin, width, lanes)
                with T.serial(T.int64(width // lanes)) as j:
                    value = load(projected, [i, begin + j * lanes], lanes)
                    value = value * broadcast(scale, lanes)
                    store(out, [i, begin + width + j * lanes], lanes, value)

        parallel_if(n * (num_streams * width) >= PARALLEL_ELEMENTS, n, row)

    def arguments(n):
        return [
            ("x", (n, width), dtype),
            ("projected", (n, (num_streams - 1) * width), dtype),
            ("out", (n, num_streams * width), dtype),
        ]

    return rows_kernel(arguments, body, target)


@built_once
def merge_streams(num_streams: int, width: int, dtype: str, target: VectorTarget) -> tirx.PrimFunc:
    """Build the kernel of the mean of the first stream and what the others were projected to.

    Each projected stream is scaled to the root mean square of the first one.

    Arguments of the kernel: x [n, num_streams * width], one projected stream [n, width] for each
    other stream, out [n, width].
    """
    lanes, count = math.gcd(width, target.lanes), num_streams - 1

    def body(n, x, *projected_and_out):
        *projected, out = projected_and_out

        def row(i):
            size = temp(T.sqrt(_mean_square(x, i, 0, width, lanes)))
            scales = [_scale_to(size, each, i, 0, width, lanes) for each in projected]
            with T.serial(T.int64(width // lanes)) as j:
                at = [i, j * lanes]
                total = load(x, at, lanes)
                for each, scale in zip(projected, scales, strict=True):
                    total = total + load(each, at, lanes) * broadcast(scale, lanes)
                store(out, at, lanes, total * constant(1 / num_streams, lanes))

        parallel_if(n * (num_streams * width) >= PARALLEL_ELEMENTS, n, row)

    def arguments(n):
        return [
            ("x", (n, num_streams * width), dtype),
            *((f"projected_{i}", (n, width), dtype) for i in range(count)),
            ("out", (n, width), dtype),
        ]

    return rows_kernel(arguments, body, target)


def _mean_square(x, row, begin, width: int, lanes: int):
    squares = Register(lanes, init=constant(0.0, lanes))
    with T.serial(T.int64(width // lanes)) as j:
        value = temp(load(x, [row, begin + j * lanes], lanes), lanes)
        squares.fma(value, value)
    return reduce_lanes(squares.get(), lanes, plus) / T.float32(width)


def _scale_to(size, x, row, begin, width: int, lanes: int):
    """Return the factor that gives columns of a row the root mean square `size`."""
    square = _mean_square(x, row, begin, width, lanes)
    return temp(size / T.sqrt(T.max(square, T.float32(_SMALLEST))))


@built_once
def predict_streams(
    num_streams: int, width: int, dtype: str, target: VectorTarget
) -> tirx.PrimFunc:
    """Build the kernel that predicts the streams behind a layer: x plus a mixture of its streams.

    Stream `to` gets stream `of` times the sum over r of ``weight[to * num_streams + of, r]`` times
    ``tanh(routed[r])``.

    Arguments of the kernel: x [n, num_streams * width], routed float32 [n, num_streams], weight
    float32 [num_streams ** 2, num_streams], out like x.
    """
    lanes, streams = math.gcd(width, target.lanes), range(num_streams)

    def body(n, x, routed, weight, out):
        def row(i):
            shares = _shares(routed, i, num_streams)
            mixture = [
                [_dot(weight, to * num_streams + of, shares) for of in streams] for to in streams
            ]
            with T.serial(T.int64(width // lanes)) as j:
                values = [temp(load(x, [i, j * lanes + s * width], lanes), lanes) for s in streams]
                for to in streams:
                    total = values[to]
                    for factor, value in zip(mixture[to], values, strict=True):
                        total = total + value * broadcast(factor, lanes)
                    store(out, [i, j * lanes + to * width], lanes, total)

        parallel_if(n * (num_streams * width) >= PARALLEL_ELEMENTS, n, row)

    def arguments(n):
        return [
            ("x", (n, num_streams * width), dtype),
            ("routed", (n, num_streams), F32),
            ("weight", (num_streams**2, num_streams), F32),
            ("out", (n, num_streams * width), dtype),
        ]

    return rows_kernel(arguments, body, target)


@built_once
def correct_streams(
    num_streams: int, active: int, width: int, dtype: str, target: VectorTarget
) -> tirx.PrimFunc:
    """Build the kernel that adds to each stream a share of what a layer changed in the active one.

    The share of stream s is 1 plus the sum over r of ``weight[s, r] * tanh(routed[r])``.

    Arguments of the kernel: predicted [n, num_streams * width], computed [n, width], routed float32
    [n, num_streams], weight float32 [num_streams, num_streams], out like `predicted`.
    """
    lanes, streams = math.gcd(width, target.lanes), range(num_streams)

    def body(n, predicted, computed, routed, weight, out):
        def row(i):
            shares = _shares(routed, i, num_streams)
            factors = [temp(_dot(weight, s, shares) + T.float32(1.0)) for s in streams]
            with T.serial(T.int64(width // lanes)) as j:
                before = load(predicted, [i, j * lanes + active * width], lanes)
                change = temp(load(computed, [i, j * lanes], lanes) - before, lanes)
                for s in streams:
                    at = [i, j * lanes + s * width]
                    value = load(predicted, at, lanes) + change * broadcast(factors[s], lanes)
                    store(out, at, lanes, value)

        parallel_if(n * (num_streams * width) >= PARALLEL_ELEMENTS, n, row)

    def arguments(n):
        return [
            ("predicted", (n, num_streams * width), dtype),
            ("computed", (n, width), dtype),
            ("routed", (n, num_streams), F32),
            ("weight", (num_streams, num_streams), F32),
            ("out", (n, num_streams * width), dtype),
        ]

    return rows_kernel(arguments, body, target)


@built_once
def add_to_streams(num_streams: int, width: int, dtype: str, target: VectorTarget) -> tirx.PrimFunc:
    """Build the kernel that adds rows to all streams but the first.

    Arguments of the kernel: x [n, num_streams * width], added [n, width], out like x.
    """
    lanes = math.gcd(width, target.lanes)

    def body(n, x, added, out):
        def row(i):
            with T.serial(T.int64(width // lanes)) as j:
                value = temp(load(added, [i, j * lanes], lanes), lanes)
                for s in range(num_streams):
                    at = [i, j * lanes + s * width]
                    store(out, at, lanes, load(x, at, lanes) + value if s else load(x, at, lanes))

        parallel_if(n * (num_streams * width) >= PARALLEL_ELEMENTS, n, row)

    def arguments(n):
        return [
            ("x", (n, num_streams * width), dtype),
            ("added", (n, width), dtype),
            ("out", (n, num_streams * width), dtype),
        ]

    return rows_kernel(arguments, body, target)


@built_once
def scaled_sum(width: int, factor: float, dtype: str, target: VectorTarget) -> tirx.PrimFunc:
    """``(x + y) * factor`` for x, y and out [n, width]."""
    lanes = math.gcd(width, target.lanes)

    def body(n, x, y, out):
        def row(i):
            with T.serial(T.int64(width // lanes)) as j:
                at = [i, j * lanes]
                total = load(x, at, lanes) + load(y, at, lanes)
                store(out, at, lanes, total * constant(factor, lanes))

        parallel_if(n * width >= PARALLEL_ELEMENTS, n, row)

    def arguments(n):
        return [(name, (n, width), dtype) for name in ("x", "y", "out")]

    return rows_kernel(arguments, body, target)


def _shares(routed, row, count: int) -> list:
    """Return tanh of the logits of a row."""
    shares = []
    for s in range(count):
        double = temp(routed[row, s] * T.float32(2.0))
        shares.append(temp(T.float32(2.0) * sigmoid(double, 1) - T.float32(1.0)))
    return shares


def _dot(weight, row: int, shares: list):
    return temp(sum(weight[row, r] * share for r, share in enumerate(shares)))
