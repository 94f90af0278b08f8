# SPDX-License-Identifier: Apache-2.0
"""The CPU kernels of a decoder that are not attention: linear, RMS norm, SwiGLU, embedding.

A weight matrix of `out_features` rows is kept packed as ``[blocks, in_features, width]``, so that
one block is read once, in order, for up to six rows of activations held in registers.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
from tvm import tirx
from tvm.script import tirx as T
from tvm.script.ir_builder import IRBuilder
from tvm.script.ir_builder import tirx as ir

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
from tir_kernels.spec import ITEMSIZE, LOG2E, VectorTarget

TILE_ROWS = 6
UNIT_ROWS = 16 * TILE_ROWS  # rows that reuse a block of weights before the next one
_PARALLEL_FLOPS = 1 << 19  # below: cheaper than waking the other threads
_PARALLEL_ELEMENTS = 1 << 15


def _kernel(arguments: Callable, body: Callable) -> tirx.PrimFunc:
    """A PrimFunc over n rows: ``arguments(n)`` lists (name, shape, dtype), `body` the rest."""
    with IRBuilder() as builder, ir.prim_func(s_tir=True, private=True):
        ir.func_name("kernel")
        ir.func_attr({"tirx.is_scheduled": True, "tirx.noalias": True})
        n = T.int64()
        described = arguments(n)
        handles = [ir.arg(name, T.handle()) for name, _, _ in described]
        buffers = [
            ir.match_buffer(handle, shape, dtype, align=ITEMSIZE.get(dtype, 4))
            for handle, (_, shape, dtype) in zip(handles, described, strict=True)
        ]
        with T.sblock("root"):  # Relax asks every function for one
            T.reads()
            T.writes()
            body(n, *buffers)
    return builder.get()


def _parallel_if(condition, extent, body: Callable) -> None:
    """Run ``body(i)`` for each i, on all threads where `condition` holds."""
    with T.If(condition):
        with T.Then():
            with T.parallel(extent) as i:
                body(i)
        with T.Else():
            with T.serial(extent) as i:
                body(i)


def block_width(target: VectorTarget) -> int:
    """Output features of a block of packed weights."""
    return target.lanes * (4 if target.registers >= 32 else 2)


def packed_shape(out_features: int, in_features: int, target: VectorTarget) -> tuple[int, int, int]:
    """Shape of a packed weight matrix."""
    width = block_width(target)
    return (-(-out_features // width), in_features, width)


def pack(weight: np.ndarray, target: VectorTarget) -> np.ndarray:
    """Pack ``[out_features, in_features]``; missing rows of the last block are zero."""
    blocks, depth, width = packed_shape(*weight.shape, target)
    padded = np.zeros((blocks * width, depth), weight.dtype)
    padded[: len(weight)] = weight
    return np.ascontiguousarray(padded.reshape(blocks, width, depth).transpose(0, 2, 1))


def linear(
    in_features: int,
    out_features: int,
    dtype: str,
    out_dtype: str,
    target: VectorTarget,
    *,
    bias: bool = False,
    residual: bool = False,
) -> tirx.PrimFunc:
    """``out = x @ weight.T (+ bias) (+ residual)``, accumulated in float32.

    Arguments of the kernel: x [n, in_features], packed weight, bias [out_features] and residual
    [n, out_features] where chosen, out [n, out_features] of `out_dtype`.
    """
    blocks, depth, width = packed_shape(out_features, in_features, target)
    lanes = target.lanes
    vectors = width // lanes
    tail = out_features - (blocks - 1) * width

    def columns(block, v, write):
        """Call ``write(column, lanes)`` on the columns of vector v that exist."""
        first = block * width + v * lanes
        if v * lanes + lanes <= tail:
            write(first, lanes)
            return
        with T.If(block < blocks - 1):
            with T.Then():
                write(first, lanes)
            with T.Else():
                for i in range(max(0, tail - v * lanes)):
                    write(first + i, 1, i)

    def tile(x, w, extras, out, block, row, rows):
        accumulators = [[Register(lanes) for _ in range(vectors)] for _ in range(rows)]
        for registers in accumulators:
            for register in registers:
                register.set(constant(0.0, lanes))
        with T.serial(T.int64(depth)) as k:
            weights = [temp(load(w, [block, k, v * lanes], lanes), lanes) for v in range(vectors)]
            for r, registers in enumerate(accumulators):
                value = temp(broadcast(load(x, [row + r, k], 1), lanes), lanes)
                for register, weight in zip(registers, weights, strict=True):
                    register.fma(value, weight)
        for r, registers in enumerate(accumulators):
            for v, register in enumerate(registers):

                def write(column, count, lane=None, register=register, r=r):
                    value = register.get() if lane is None else register.buffer[lane]
                    if bias:
                        value = value + load(extras[0], [column], count)
                    if residual:
                        value = value + load(extras[-1], [row + r, column], count)
                    store(out, [row + r, column], count, value)

                columns(block, v, write)

    def body(n, x, w, *extras_and_out):
        *extras, out = extras_and_out
        row_units = temp((n + UNIT_ROWS - 1) // UNIT_ROWS, 1, "int64")

        def unit(index):
            block = temp(index // row_units, 1, "int64")
            begin = temp(index % row_units * UNIT_ROWS, 1, "int64")
            count = temp(T.min(n - begin, T.int64(UNIT_ROWS)), 1, "int64")
            with T.serial(count // TILE_ROWS) as i:
                tile(x, w, extras, out, block, begin + i * TILE_ROWS, TILE_ROWS)
            rest = temp(count % TILE_ROWS, 1, "int64")
            row = Register(1, "int64", init=begin + count - rest)
            for rows in (4, 2, 1):
                with T.If(T.bitwise_and(rest, T.int64(rows)) != T.int64(0)):
                    with T.Then():
                        tile(x, w, extras, out, block, row.get(), rows)
                        row.set(row.get() + T.int64(rows))

        flops = n * (out_features * in_features)
        _parallel_if(flops >= _PARALLEL_FLOPS, row_units * blocks, unit)

    def arguments(n):
        return [
            ("x", (n, in_features), dtype),
            ("weight", (blocks, depth, width), dtype),
            *([("bias", (out_features,), dtype)] if bias else []),
            *([("residual", (n, out_features), dtype)] if residual else []),
            ("out", (n, out_features), out_dtype),
        ]

    return _kernel(arguments, body)


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

        _parallel_if(n * features >= _PARALLEL_ELEMENTS, n, row)

    def arguments(n):
        rows = (n, features)
        return [("x", rows, dtype), ("weight", (features,), dtype), ("out", rows, dtype)]

    return _kernel(arguments, body)


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

        _parallel_if(n * features >= _PARALLEL_ELEMENTS, n, row)

    def arguments(n):
        return [("x", (n, 2 * features), dtype), ("out", (n, features), dtype)]

    return _kernel(arguments, body)


def embedding(vocab_size: int, features: int, dtype: str, target: VectorTarget) -> tirx.PrimFunc:
    """Rows of a packed matrix: ids int32 [n], packed weight, out [n, features]."""
    blocks, depth, width = packed_shape(vocab_size, features, target)

    def body(n, ids, weight, out):
        with T.serial(n) as i, T.serial(T.int64(features)) as j:
            store(
                out,
                [i, j],
                1,
                load(weight, [ids[i] // width, j, ids[i] % width], 1),
            )

    def arguments(n):
        return [
            ("ids", (n,), "int32"),
            ("weight", (blocks, depth, width), dtype),
            ("out", (n, features), dtype),
        ]

    return _kernel(arguments, body)


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

    return _kernel(arguments, body)
