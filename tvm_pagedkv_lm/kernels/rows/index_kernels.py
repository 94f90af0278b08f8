# SPDX-License-Identifier: Apache-2.0
"""CPU kernels of an indexer: its keys, normalized and rotated, and the rows of its heads."""

from tvm.script import tirx as T

from tir_kernels.cpu.isa.cos_sin import CosSin
from tir_kernels.script import prim_func
from tir_kernels.spec import RopeSpec, VectorTarget
from tir_kernels.targets import row_worker

from ..define import attributes, built_once, match_float32, match_int32, matcher
from .copies import copy_columns, rotate_columns
from .norms import Norm, normalize


@built_once
def index_keys(dim: int, epsilon: float, rope: RopeSpec, dtype: str, target: VectorTarget):
    """Build the kernel of index keys: a layer norm, then a rotation of the first columns.

    Arguments of the kernel: x [n, dim], weight and bias float32 [dim], positions int32 [n], keys
    [n, dim].
    """
    match_rows = matcher(target, dtype)

    @prim_func
    def index_keys(
        var_x: T.handle,
        var_weight: T.handle,
        var_bias: T.handle,
        var_positions: T.handle,
        var_keys: T.handle,
    ):
        T.func_attr(attributes(target))
        n = T.int64()
        x = match_rows(var_x, n, dim)
        weight = match_float32(var_weight, dim)
        bias = match_float32(var_bias, dim)
        positions = match_int32(var_positions, n)
        keys = match_rows(var_keys, n, dim)
        worker = row_worker(target)
        v = worker.vectors(dim)
        for row in worker.items(n, dim):
            x_norm = Norm(v, epsilon, subtracts_mean=True)
            normalize(x_norm, x, row, 0, weight, keys, 0, bias)
            cos_sin = CosSin(rope, target.lanes)
            cos_sin.fill(positions[row])
            rotate_columns(cos_sin, keys, (row,), 0, keys, (row,), 0)

    return index_keys


@built_once
def index_queries(num_heads: int, dim: int, rope: RopeSpec, dtype: str, target: VectorTarget):
    """Build the kernel that rotates the first columns of each index head.

    Arguments of the kernel: x [n, num_heads * dim], the columns to rotate of all heads before the
    others of all heads; positions int32 [n]; q [n, num_heads, dim].
    """
    match_rows, rotated = matcher(target, dtype), rope.rotary_dim
    rest = dim - rotated

    @prim_func
    def index_queries(var_x: T.handle, var_positions: T.handle, var_q: T.handle):
        T.func_attr(attributes(target))
        n = T.int64()
        x = match_rows(var_x, n, num_heads * dim)
        positions = match_int32(var_positions, n)
        q = match_rows(var_q, n, num_heads, dim)
        worker = row_worker(target)
        v = worker.vectors(rest)
        for row in worker.items(n, num_heads * dim):
            cos_sin = CosSin(rope, target.lanes)
            cos_sin.fill(positions[row])
            for head in range(T.int64(num_heads)):
                rotate_columns(cos_sin, x, (row,), head * rotated, q, (row, head), 0)
                begin = T.meta_var(num_heads * rotated + head * rest)
                copy_columns(v, x, (row,), begin, q, (row, head), rotated)

    return index_queries
