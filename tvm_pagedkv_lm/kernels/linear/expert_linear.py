# SPDX-License-Identifier: Apache-2.0
"""Linear layers of experts: each pair of a token row and a chosen expert has a product of its own.

The packed matrices of all experts are one array, block after block. A task multiplies a block of an
expert with up to `TASK_ROWS` of its pairs, so the weights of an expert are read once for these, and
those of an expert without pairs are not read at all.
"""

from functools import partial
from operator import add

from tvm.script import tirx as T

from tir_kernels.script import opened, prim_func

from ..define import attributes, built_once, match_int32, matcher, parallel_if, unused
from .code_matrix import CodeMatrix
from .packed_layout import PackedMatrix
from .packed_products import PARALLEL_FLOPS
from .products import products_for
from .stored_sums import Output, store_sums

_FEW_PAIRS = 6  # of a task on average, below which reading its weights takes the time


def stacked_shape(matrix: PackedMatrix | CodeMatrix, num_experts: int) -> tuple[int, int, int]:
    """Return the shape of the packed matrices of all experts."""
    blocks, depth, width = matrix.shape
    return num_experts * blocks, depth, width


@built_once
def expert_linear(
    matrix: PackedMatrix | CodeMatrix,
    num_experts: int,
    num_chosen: int,
    dtype: str,
    out_dtype: str,
    *,
    gathers: bool,
    bias: bool = False,
):
    """Build the kernel of ``out = x @ weight[expert].T (+ bias[expert])`` for all pairs.

    Rows are in the order of `routing_kernels.group_pairs`, but for those of x if the kernel
    `gathers` them from token rows, and those of out if it does not: these are in the order of
    pairs.

    Arguments of the kernel: x [n, in_features] of `dtype` if it `gathers`, otherwise
    [n * num_chosen, in_features], or what `row_codes.encode_rows` makes of them if
    `matrix.multiplies_codes`; packed weights `stacked_shape`; bias [num_experts, out_features] of
    `dtype` where chosen; pairs, tasks and num_tasks of `group_pairs`; out
    [n * num_chosen, out_features] of `out_dtype`.
    """
    products = products_for(matrix, dtype)
    num_blocks, out_features, target = matrix.num_blocks, matrix.out_features, matrix.target
    match_weight, match_out = matcher(target, matrix.dtype), matcher(target, out_dtype)
    match_bias = matcher(target, dtype)

    @prim_func(absent=products.unused_rows | unused(bias=bias))
    def expert_linear(
        var_x: T.handle,
        var_x_scales: T.handle,
        var_x_sums: T.handle,
        var_weight: T.handle,
        var_bias: T.handle,
        var_pairs: T.handle,
        var_tasks: T.handle,
        var_num_tasks: T.handle,
        var_out: T.handle,
    ):
        T.func_attr(attributes(target))
        n = T.int64()
        num_pairs = T.meta_var(n * num_chosen if gathers else n)
        x = T.meta_var(products.match_rows(n, dtype, var_x, var_x_scales, var_x_sums))
        weight = match_weight(var_weight, *stacked_shape(matrix, num_experts))
        bias_buffer = match_bias(var_bias, num_experts, out_features)
        pairs = match_int32(var_pairs, num_pairs)
        tasks = match_int32(var_tasks, num_pairs, 3)
        num_tasks = match_int32(var_num_tasks, 1)
        out = match_out(var_out, num_pairs, out_features)
        products.begin(x, weight)
        products.open_scope()
        flops = T.meta_var(num_pairs * (out_features * matrix.in_features))
        extent = T.cast(num_tasks[0], "int64") * num_blocks
        for index in parallel_if(flops >= PARALLEL_FLOPS, extent):
            task_count = T.cast(num_tasks[0], "int64")
            # Tasks of a few pairs wait for weights, which a thread reads in order. Otherwise all
            # threads take the same blocks of every expert, so none has more pairs than others.
            is_in_order = T.meta_var(num_pairs < task_count * _FEW_PAIRS)
            block = T.Select(is_in_order, index % num_blocks, index // task_count)
            task = T.Select(is_in_order, index // num_blocks, index % task_count)
            expert = T.cast(tasks[task, 0], "int64")
            begin = T.cast(tasks[task, 1], "int64")
            count = T.cast(tasks[task, 2], "int64")
            in_order, pair_of = T.meta_var((partial(add, begin), partial(_pair_of, pairs, begin)))
            token_of = T.meta_var(partial(_token_of, pairs, begin, num_chosen))
            row_of, out_row_of = T.meta_var(
                (token_of, in_order) if gathers else (in_order, pair_of)
            )
            addends = T.meta_var([(bias_buffer, partial(_same_row, expert))])
            output = T.meta_var(Output(out, out_row_of, addends))
            sums = T.meta_var(opened(products.task(count, row_of)))
            stacked = expert * num_blocks + block
            store_sums(matrix, sums(stacked), block, count, output)

    return expert_linear


def _pair_of(pairs, begin, row):
    """Return the pair that row `row` of a task is."""
    return T.cast(pairs[begin + row], "int64")


def _token_of(pairs, begin, num_chosen: int, row):
    """Return the token row of this pair."""
    return _pair_of(pairs, begin, row) // num_chosen


def _same_row(index, row):
    """Return the same index for every row."""
    return index
