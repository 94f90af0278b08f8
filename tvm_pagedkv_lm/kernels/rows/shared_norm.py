# SPDX-License-Identifier: Apache-2.0
"""CPU kernels of the gate and the norm behind a recurrence whose heads several workers divide.

A norm over all heads needs the sum of squares of all workers: one kernel gates and sums, the
workers add their sums, and another kernel scales.
"""

from tvm.relax.frontend import nn
from tvm.relax.frontend.nn import op
from tvm.script import tirx as T

from tir_kernels.script import prim_func
from tir_kernels.spec import VectorTarget
from tir_kernels.targets import row_worker

from ..define import attributes, built_once, match_float32, matcher
from .state_kernels import activated


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
    outs = [placeholder(rows, "float32"), placeholder((rows[0], 1), "float32")]
    values, squares = op.tensor_ir_op(kernel, "gate_and_sum", [o, gate, x, d], outs)
    squares = op.ccl_allreduce(squares, "sum")
    width = rows[1] * num_shards
    kernel = _scale(rows[1], width, epsilon, norm == "gate_last", dtype, target)
    scaled = [values, squares, gate, weight]
    return op.tensor_ir_op(kernel, "scale_rows", scaled, placeholder(rows, dtype))


@built_once
def _gate_and_sum(
    heads: tuple[int, int], skip_width: int, is_gated: bool, dtype: str, target: VectorTarget
):
    """Build the kernel of ``o + d * x``, gated or not, and of the sums of squares of its rows.

    Arguments of the kernel: o and gate [n, features], x [n, skip_width], d float32 [heads], values
    float32 [n, features], squares float32 [n, 1].
    """
    num_heads, head_dim = heads
    features, match_rows = num_heads * head_dim, matcher(target, dtype)

    @prim_func
    def gate_and_sum(
        var_o: T.handle,
        var_gate: T.handle,
        var_x: T.handle,
        var_d: T.handle,
        var_values: T.handle,
        var_squares: T.handle,
    ):
        T.func_attr(attributes(target))
        n = T.int64()
        o = match_rows(var_o, n, features)
        gate = match_rows(var_gate, n, features)
        x = match_rows(var_x, n, skip_width)
        d = match_float32(var_d, num_heads)
        values = match_float32(var_values, n, features)
        squares = match_float32(var_squares, n, 1)
        worker = row_worker(target)
        v = worker.vectors(head_dim)
        for row in worker.items(n, features):
            total = v.constant(0.0)
            for head in range(T.int64(num_heads)):
                for column in v.columns():
                    at = T.meta_var((row, head * head_dim + column))
                    value = v.load(o, at) + v.load(x, at) * v.filled(d[head])
                    if is_gated:
                        value *= activated("silu", v, gate, at)
                    total += value * value
                    v.store(values, at, value)
            squares[row, 0] = v.sum(total)

    return gate_and_sum


@built_once
def _scale(
    features: int, width: int, epsilon: float, is_gated: bool, dtype: str, target: VectorTarget
):
    """Build the kernel that divides rows by the root of their mean square, and gates them or not.

    Arguments of the kernel: values float32 [n, features], squares float32 [n, 1], sums over `width`
    columns, gate [n, features], weight float32 [features], out [n, features].
    """
    match_rows = matcher(target, dtype)

    @prim_func
    def scale_rows(
        var_values: T.handle,
        var_squares: T.handle,
        var_gate: T.handle,
        var_weight: T.handle,
        var_out: T.handle,
    ):
        T.func_attr(attributes(target))
        n = T.int64()
        values = match_float32(var_values, n, features)
        squares = match_float32(var_squares, n, 1)
        gate = match_rows(var_gate, n, features)
        weight = match_float32(var_weight, features)
        out = match_rows(var_out, n, features)
        worker = row_worker(target)
        v = worker.vectors(features)
        for row in worker.items(n, features):
            mean_square = T.meta_var(squares[row, 0] / T.float32(width))
            scale = T.float32(1.0) / T.sqrt(mean_square + T.float32(epsilon))
            for column in v.columns():
                value = v.load(values, (row, column)) * v.filled(scale)
                value *= v.load(weight, (column,))
                if is_gated:
                    value *= activated("silu", v, gate, (row, column))
                v.store(out, (row, column), value)

    return scale_rows
