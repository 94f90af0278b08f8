# SPDX-License-Identifier: Apache-2.0
"""CPU kernels of the gate and the norm behind a recurrence whose heads several workers divide.

A norm over all heads needs the sum of squares of all workers: one kernel gates and sums, the
workers add their sums, and another kernel scales.
"""

from __future__ import annotations

import math

from tvm import tirx
from tvm.relax.frontend import nn
from tvm.relax.frontend.nn import op
from tvm.script import tirx as T

from tir_kernels.cpu.isa.simd import (
    F32,
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

from .emit import built_once, parallel_if, rows_kernel
from .row_kernels import PARALLEL_ELEMENTS
from .state_kernels import silu_at


def shared_norm(
    inputs: list[nn.Tensor],
    heads: tuple[int, int],
    norm: str,
    epsilon: float,
    num_shards: int,
    dtype: str,
    target: VectorTarget,
) -> nn.Tensor:
    """Return a worker's columns of the gated norm over the heads of all workers.

    Parameters
    ----------
    inputs : list of nn.Tensor
        o and gate [n, features], x [n, skip_width] and d float32 [heads], whose product is added to
        o, and the weight float32 [features] of the norm.
    heads : (int, int)
        Number of the worker's heads, and their width.
    norm : {"gate_first", "gate_last"}
        Whether ``silu(gate)`` multiplies before or after the RMS norm.
    epsilon : float
    num_shards : int
        Number of workers, each with as many heads.
    dtype : str
    target : VectorTarget

    Returns
    -------
    nn.Tensor
        ``[n, features]`` of type `dtype`.
    """
    (o, gate, x, d, weight), placeholder = inputs, nn.Tensor.placeholder
    rows = (o.shape[0], heads[0] * heads[1])
    kernel = _gate_and_sum(heads, x.shape[1], norm == "gate_first", dtype, target)
    outs = [placeholder(rows, F32), placeholder((rows[0], 1), F32)]
    values, squares = op.tensor_ir_op(kernel, "gate_and_sum", [o, gate, x, d], outs)
    squares = op.ccl_allreduce(squares, "sum")
    width = rows[1] * num_shards
    kernel = _scale(rows[1], width, epsilon, norm == "gate_last", dtype, target)
    scaled = [values, squares, gate, weight]
    return op.tensor_ir_op(kernel, "scale_rows", scaled, placeholder(rows, dtype))


@built_once
def _gate_and_sum(
    heads: tuple[int, int], skip_width: int, is_gated: bool, dtype: str, target: VectorTarget
) -> tirx.PrimFunc:
    """Build the kernel of ``o + d * x``, gated or not, and of the sums of squares of its rows.

    Arguments of the kernel: o and gate [n, features], x [n, skip_width], d float32 [heads], values
    float32 [n, features], squares float32 [n, 1].
    """
    num_heads, head_dim = heads
    features, lanes = num_heads * head_dim, math.gcd(head_dim, target.lanes)

    def body(n, o, gate, x, d, values, squares):
        def row(i):
            total = Register(lanes, init=constant(0.0, lanes))
            with T.serial(T.int64(num_heads)) as head, T.serial(T.int64(head_dim // lanes)) as j:
                at = [i, head * head_dim + j * lanes]
                value = load(o, at, lanes) + load(x, at, lanes) * broadcast(d[head], lanes)
                if is_gated:
                    value = value * silu_at(gate, at, lanes)
                value = temp(value, lanes)
                total.fma(value, value)
                store(values, at, lanes, value)
            T.buffer_store(squares, reduce_lanes(total.get(), lanes, add), [i, 0])

        parallel_if(n * features >= PARALLEL_ELEMENTS, n, row)

    def arguments(n):
        return [
            ("o", (n, features), dtype),
            ("gate", (n, features), dtype),
            ("x", (n, skip_width), dtype),
            ("d", (num_heads,), F32),
            ("values", (n, features), F32),
            ("squares", (n, 1), F32),
        ]

    return rows_kernel(arguments, body, target)


@built_once
def _scale(
    features: int, width: int, epsilon: float, is_gated: bool, dtype: str, target: VectorTarget
) -> tirx.PrimFunc:
    """Build the kernel that divides rows by the root of their mean square, and gates them or not.

    Arguments of the kernel: values float32 [n, features], squares float32 [n, 1], sums over `width`
    columns, gate [n, features], weight float32 [features], out [n, features].
    """
    lanes = math.gcd(features, target.lanes)

    def body(n, values, squares, gate, weight, out):
        def row(i):
            mean = squares[i, 0] / T.float32(width)
            scale = temp(T.float32(1.0) / T.sqrt(mean + T.float32(epsilon)))
            with T.serial(T.int64(features // lanes)) as j:
                at = [i, j * lanes]
                value = load(values, at, lanes) * broadcast(scale, lanes)
                value = value * load(weight, [j * lanes], lanes)
                if is_gated:
                    value = value * silu_at(gate, at, lanes)
                store(out, at, lanes, value)

        parallel_if(n * features >= PARALLEL_ELEMENTS, n, row)

    def arguments(n):
        return [
            ("values", (n, features), F32),
            ("squares", (n, 1), F32),
            ("gate", (n, features), dtype),
            ("weight", (features,), F32),
            ("out", (n, features), dtype),
        ]

    return rows_kernel(arguments, body, target)
