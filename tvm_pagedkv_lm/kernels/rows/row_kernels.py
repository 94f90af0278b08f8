# SPDX-License-Identifier: Apache-2.0
"""Kernels of a decoder that take, scale, sum or cap columns of rows, on any target."""

from tvm.script import tirx as T

from tir_kernels.script import prim_func
from tir_kernels.semantics.softmax import soft_cap
from tir_kernels.spec import LOG2E
from tir_kernels.targets import row_worker

from ...config.query_scale import QueryScale
from ..define import Target, attributes, built_once, match_float32, match_int32, matcher, unused


@built_once
def scale_queries(q_width: int, features: int, scale: QueryScale, dtype: str, target: Target):
    """Build the kernel that multiplies Q by a factor that grows with the position.

    Parameters
    ----------
    q_width, features : int
        Columns of Q, and of Q, K and V. Those of K and V are copied.
    scale : QueryScale

    Arguments of the kernel: x [n, features], positions int32 [n], out like x.
    """
    match_rows = matcher(target, dtype)

    @prim_func
    def scale_queries(var_x: T.handle, var_positions: T.handle, var_out: T.handle):
        T.func_attr(attributes(target))
        n = T.int64()
        x = match_rows(var_x, n, features)
        positions = match_int32(var_positions, n)
        out = match_rows(var_out, n, features)
        worker = row_worker(target)
        v = worker.vectors(features, q_width)
        for row in worker.items(n, features):
            steps = T.cast((positions[row] + scale.offset) // scale.floor + 1, "float32")
            growth = T.log(steps) * T.float32(scale.factor) + T.float32(1.0)
            for column in v.columns():
                factor = T.if_then_else(column < q_width, growth, T.float32(1.0))
                v.store(out, (row, column), v.load(x, (row, column)) * v.filled(factor))

    return scale_queries


@built_once
def soft_cap_logits(features: int, cap: float, target: Target):
    """Build the kernel of ``cap * tanh(x / cap)`` for x and out float32 [n, features]."""

    @prim_func
    def soft_cap_logits(var_x: T.handle, var_out: T.handle):
        T.func_attr(attributes(target))
        n = T.int64()
        x = match_float32(var_x, n, features)
        out = match_float32(var_out, n, features)
        worker = row_worker(target)
        v = worker.vectors(features)
        for row in worker.items(n, features):
            for column in v.columns():
                # `soft_cap` takes and gives logits times log2(e).
                score = T.meta_var(v.load(x, (row, column)) * v.constant(LOG2E))
                capped = T.meta_var(
                    soft_cap(score, cap, v.lanes, v.arithmetic) * v.constant(1 / LOG2E)
                )
                v.store(out, (row, column), capped)

    return soft_cap_logits


@built_once
def take_rows(features: int, dtype: str, target: Target):
    """Build the kernel of ``out = x[rows]``: x [n, features], rows int32 [b], out [b, features]."""
    match_rows = matcher(target, dtype)

    @prim_func
    def take_rows(var_x: T.handle, var_rows: T.handle, var_out: T.handle):
        T.func_attr(attributes(target))
        n, b = T.int64(), T.int64()
        x = match_rows(var_x, n, features)
        rows = match_int32(var_rows, b)
        out = match_rows(var_out, b, features)
        worker = row_worker(target)
        v = worker.vectors(features)
        for i in range(b):
            for column in v.columns():
                v.store(out, (i, column), v.load(x, (T.cast(rows[i], "int64"), column)))

    return take_rows


@built_once
def take_columns(
    features: int, begin: int, width: int, dtype: str, target: Target, *, scaled: bool = False
):
    """Build the kernel of ``out = x[:, begin : begin + width] (* weight)``.

    Arguments of the kernel: x [n, features], weight float32 [width] where chosen, out [n, width].
    """
    match_rows = matcher(target, dtype)

    @prim_func(absent=unused(weight=scaled))
    def take_columns(var_x: T.handle, var_weight: T.handle, var_out: T.handle):
        T.func_attr(attributes(target))
        n = T.int64()
        x = match_rows(var_x, n, features)
        weight = match_float32(var_weight, width)
        out = match_rows(var_out, n, width)
        worker = row_worker(target)
        v = worker.vectors(width)
        for row in worker.items(n, width):
            for column in v.columns():
                value = v.load(x, (row, column + begin))
                if scaled:
                    value *= v.load(weight, (column,))
                v.store(out, (row, column), value)

    return take_columns


@built_once
def scaled_sum(width: int, factor: float, dtype: str, target: Target):
    """Build the kernel of ``(x + y) * factor`` for x, y and out [n, width]."""
    match_rows = matcher(target, dtype)

    @prim_func
    def scaled_sum(var_x: T.handle, var_y: T.handle, var_out: T.handle):
        T.func_attr(attributes(target))
        n = T.int64()
        x = match_rows(var_x, n, width)
        y = match_rows(var_y, n, width)
        out = match_rows(var_out, n, width)
        worker = row_worker(target)
        v = worker.vectors(width)
        for row in worker.items(n, width):
            for column in v.columns():
                total = v.load(x, (row, column)) + v.load(y, (row, column))
                v.store(out, (row, column), total * v.constant(factor))

    return scaled_sum
