# SPDX-License-Identifier: Apache-2.0
"""Kernels of per-layer embeddings, on any target."""

import math

from tvm.script import tirx as T

from tir_kernels.script import prim_func
from tir_kernels.targets import row_worker

from ..define import Target, attributes, built_once, match_float32, match_int32, matcher
from .copies import copy_columns
from .gates import activate
from .norms import Norm, normalize


@built_once
def ids_in_table(size: int, target: Target):
    """Build the kernel that replaces ids from `size` on by 0: ids and out int32 [n]."""

    @prim_func
    def ids_in_table(var_ids: T.handle, var_out: T.handle):
        T.func_attr(attributes(target))
        n = T.int64()
        ids = match_int32(var_ids, n)
        out = match_int32(var_out, n)
        for i in range(n):
            out[i] = T.if_then_else(ids[i] < size, ids[i], T.int32(0))

    return ids_in_table


@built_once
def join_inputs(hidden: int, parts: int, width: int, epsilon: float, dtype: str, target: Target):
    """Build the kernel that puts per-layer inputs after the columns of a model's rows.

    The input of a layer is a part of `width` columns: its norm of what x was projected to, plus its
    embedding, divided by the square root of 2.

    Arguments of the kernel: x [n, hidden], projected and embedded [n, parts * width], weight
    float32 [width], out [n, hidden + parts * width].
    """
    match_rows = matcher(target, dtype)

    @prim_func
    def join_inputs(
        var_x: T.handle,
        var_projected: T.handle,
        var_embedded: T.handle,
        var_weight: T.handle,
        var_out: T.handle,
    ):
        T.func_attr(attributes(target))
        n = T.int64()
        x = match_rows(var_x, n, hidden)
        projected = match_rows(var_projected, n, parts * width)
        embedded = match_rows(var_embedded, n, parts * width)
        weight = match_float32(var_weight, width)
        out = match_rows(var_out, n, hidden + parts * width)
        worker = row_worker(target)
        hidden_vectors, v = worker.vectors(hidden), worker.vectors(width)
        for row in worker.items(n, hidden + parts * width):
            copy_columns(hidden_vectors, x, (row,), 0, out, (row,), 0)
            for part in range(T.int64(parts)):
                begin, to = T.meta_var(part * width), T.meta_var(part * width + hidden)
                normalize(Norm(v, epsilon), projected, row, begin, weight, out, to)
                for column in v.columns():
                    # The norm is rounded to the type of the rows before the sum.
                    value = v.load(out, (row, to + column))
                    value += v.load(embedded, (row, begin + column))
                    v.store(out, (row, to + column), value * v.constant(math.sqrt(0.5)))

    return join_inputs


@built_once
def activated_product(
    activation: str, width: int, features: int, begin: int, dtype: str, target: Target
):
    """Build the kernel of ``activation(gate) * rows[:, begin : begin + width]``.

    Arguments of the kernel: gate [n, width], rows [n, features], out [n, width].
    """
    match_rows = matcher(target, dtype)

    @prim_func
    def activated_product(var_gate: T.handle, var_rows: T.handle, var_out: T.handle):
        T.func_attr(attributes(target))
        n = T.int64()
        gate = match_rows(var_gate, n, width)
        rows = match_rows(var_rows, n, features)
        out = match_rows(var_out, n, width)
        worker = row_worker(target)
        v = worker.vectors(width)
        for row in worker.items(n, width):
            for column in v.columns():
                value = v.load(gate, (row, column))
                other = T.meta_var(v.load(rows, (row, column + begin)))
                v.store(out, (row, column), activate(activation, value, v) * other)

    return activated_product
