# SPDX-License-Identifier: Apache-2.0
"""Linear layers: the kernels that multiply with packed weights or look up their rows.

A task multiplies up to `TASK_ROWS` rows with a block of output features, or with a few of them.
CPUs with dot products of bytes or of words multiply quantized weights as codes; `row_codes` has the
activations. Other CPUs convert the codes of a few groups to float32 numbers, which stay in the L1
cache while they are multiplied with all rows of a task. With AMX, many rows of bfloat16 are
multiplied in tiles.
"""

from functools import partial
from operator import add

from tvm.script import tirx as T

from tir_kernels.cpu.isa.simd import load, store
from tir_kernels.script import opened, prim_func

from ..define import attributes, built_once, match_int32, matcher, parallel_if, unused
from .code_matrix import CodeMatrix
from .packed_layout import PackedMatrix
from .packed_products import PARALLEL_FLOPS, TASK_ROWS
from .products import products_for
from .stored_sums import Output, store_sums


@built_once
def linear(
    matrix: PackedMatrix | CodeMatrix,
    dtype: str,
    out_dtype: str,
    *,
    bias: bool = False,
    residual: bool = False,
):
    """Build the kernel of ``out = x @ weight.T (+ bias) (+ residual)``, summed in float32.

    Arguments of the kernel: x [n, in_features] of `dtype`, or the three results of
    `row_codes.encode_rows` if `matrix.multiplies_codes`; packed weight; bias [out_features] and
    residual [n, out_features] of `dtype` where chosen; out [n, out_features] of `out_dtype`.
    """
    products = products_for(matrix, dtype)
    num_blocks, out_features, target = matrix.num_blocks, matrix.out_features, matrix.target
    match_weight, match_out = matcher(target, matrix.dtype), matcher(target, out_dtype)
    match_addend = matcher(target, dtype)

    @prim_func(absent=products.unused_rows | unused(bias=bias, residual=residual))
    def linear(
        var_x: T.handle,
        var_x_scales: T.handle,
        var_x_sums: T.handle,
        var_weight: T.handle,
        var_bias: T.handle,
        var_residual: T.handle,
        var_out: T.handle,
    ):
        T.func_attr(attributes(target))
        n = T.int64()
        x = T.meta_var(products.match_rows(n, dtype, var_x, var_x_scales, var_x_sums))
        weight = match_weight(var_weight, *matrix.shape)
        bias_buffer = match_addend(var_bias, out_features)
        residual_buffer = match_addend(var_residual, n, out_features)
        out = match_out(var_out, n, out_features)
        products.begin(x, weight)
        products.open_scope()
        row_tasks = (n + TASK_ROWS - 1) // TASK_ROWS
        per_task = T.meta_var(products.blocks_per_task(row_tasks))
        num_groups = T.meta_var((num_blocks + per_task - 1) // per_task)
        flops = T.meta_var(n * (out_features * matrix.in_features))
        for task in parallel_if(flops >= PARALLEL_FLOPS, row_tasks * num_groups):
            group = task // row_tasks
            begin = task % row_tasks * TASK_ROWS
            count = T.min(n - begin, TASK_ROWS)
            row_of = T.meta_var(partial(add, begin))
            addends = T.meta_var([(bias_buffer, None), (residual_buffer, row_of)])
            output = T.meta_var(Output(out, row_of, addends))
            sums = T.meta_var(opened(products.task(count, row_of)))
            if products.takes_many_blocks:
                first = group * per_task
                for i in range(T.min(num_blocks - first, per_task)):
                    block = first + i
                    store_sums(matrix, sums(block), block, count, output)
            else:
                store_sums(matrix, sums(group), group, count, output)

    return linear


@built_once
def embedding(matrix: PackedMatrix, scale: float = 1.0):
    """Build the kernel of rows of a packed matrix times `scale`.

    Arguments of the kernel: ids int32 [n], packed weight, out [n, in_features].
    """
    match = matcher(matrix.target, matrix.dtype)

    @prim_func
    def embedding(var_ids: T.handle, var_weight: T.handle, var_out: T.handle):
        T.func_attr(attributes(matrix.target))
        n = T.int64()
        ids = match_int32(var_ids, n)
        weight = match(var_weight, *matrix.shape)
        out = match(var_out, n, matrix.in_features)
        for i in range(n):
            for j in range(T.int64(matrix.in_features)):
                value = load(weight, matrix.index(T.cast(ids[i], "int64"), j), 1)
                if scale != 1.0:
                    value *= T.float32(scale)
                store(out, (i, j), 1, value)

    return embedding
