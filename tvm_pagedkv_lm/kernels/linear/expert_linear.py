# SPDX-License-Identifier: Apache-2.0
"""Linear layers of experts: each pair of a token row and a chosen expert has a product of its own.

The packed matrices of all experts are one array, block after block. A unit multiplies a block of an
expert with up to `UNIT_ROWS` of its pairs, so the weights of an expert are read once for these, and
those of an expert without pairs are not read at all.
"""

from __future__ import annotations

from tvm import tirx
from tvm.script import tirx as T

from tir_kernels.cpu.isa.simd import load, store, temp, wide_temp

from ..rows.emit import built_once, parallel_if, rows_kernel
from .code_matrix import CodeMatrix
from .packed_layout import PackedMatrix
from .packed_products import PARALLEL_FLOPS
from .unit_products import unit_products
from .unit_sums import for_sums

_FEW_PAIRS = 6  # of a unit on average, below which reading its weights takes the time


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
) -> tirx.PrimFunc:
    """Build the kernel of ``out = x @ weight[expert].T (+ bias[expert])`` for all pairs.

    Rows are in the order of `routing_kernels.group_pairs`, but for those of x if the kernel
    `gathers` them from token rows, and those of out if it does not: these are in the order of
    pairs.

    Arguments of the kernel: x [n, in_features] of `dtype` if it `gathers`, otherwise
    [n * num_chosen, in_features], or what `row_codes.encode_rows` makes of them if
    `matrix.multiplies_codes`; packed weights `stacked_shape`; bias [num_experts, out_features] of
    `dtype` where chosen; pairs, units and num_units of `group_pairs`; out
    [n * num_chosen, out_features] of `out_dtype`.
    """
    products = unit_products(matrix, dtype)
    num_rows, num_blocks = len(products.rows(1, dtype)), matrix.num_blocks
    in_features, out_features = matrix.in_features, matrix.out_features

    def body(n, *buffers):
        x, (weight, *biases, pairs, units, num_units, out) = buffers[:num_rows], buffers[num_rows:]
        products.begin(x, weight)

        def compute(index):
            count_of_units = wide_temp(num_units[0])
            # Units of a few pairs wait for weights, which a thread reads in order. Otherwise all
            # threads take the same blocks of every expert, so none has more pairs than others.
            is_in_order = pairs.shape[0] < count_of_units * _FEW_PAIRS
            block = temp(
                T.Select(is_in_order, index % num_blocks, index // count_of_units), 1, "int64"
            )
            unit = temp(
                T.Select(is_in_order, index // num_blocks, index % count_of_units), 1, "int64"
            )
            expert, begin, count = (wide_temp(units[unit, column]) for column in range(3))

            def pair_of(row):
                return T.cast(pairs[begin + row], "int64")

            def row_of(row):
                return pair_of(row) // num_chosen if gathers else begin + row

            def write(row, column, value, lanes):
                if biases:
                    value = value + load(biases[0], (expert, column), lanes)
                store(out, (begin + row if gathers else pair_of(row), column), lanes, value)

            with products.unit(count, row_of) as sums:
                found = sums(temp(expert * num_blocks + block, 1, "int64"))
                for_sums(matrix, found, block, count, write)

        flops = pairs.shape[0] * (out_features * in_features)
        extent = temp(wide_temp(num_units[0]) * num_blocks, 1, "int64")
        with products.scope():
            parallel_if(flops >= PARALLEL_FLOPS, extent, compute)

    def arguments(n):
        pairs = n * num_chosen if gathers else n
        return [
            *products.rows(n, dtype),
            ("weight", stacked_shape(matrix, num_experts), matrix.dtype),
            *([("bias", (num_experts, out_features), dtype)] if bias else []),
            ("pairs", (pairs,), "int32"),
            ("units", (pairs, 3), "int32"),
            ("num_units", (1,), "int32"),
            ("out", (pairs, out_features), out_dtype),
        ]

    return rows_kernel(arguments, body, matrix.target)
