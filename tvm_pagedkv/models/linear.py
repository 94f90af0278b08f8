# SPDX-License-Identifier: Apache-2.0
"""Linear layers: the kernels that multiply with packed weights or look up their rows."""

from __future__ import annotations

from tvm import tirx
from tvm.script import tirx as T

from tir_kernels.cpu.simd import load, store, temp

from .emit import built_once, parallel_if, rows_kernel
from .packed_layout import PackedMatrix
from .packed_products import PARALLEL_FLOPS, UNIT_ROWS
from .unit_products import unit_products
from .unit_sums import store_sums


@built_once
def linear(
    matrix: PackedMatrix, out_dtype: str, *, bias: bool = False, residual: bool = False
) -> tirx.PrimFunc:
    """``out = x @ weight.T (+ bias) (+ residual)``, accumulated in float32.

    Arguments of the kernel: x [n, in_features], packed weight, bias [out_features] and residual
    [n, out_features] where chosen, out [n, out_features] of `out_dtype`.
    """
    products, num_blocks = unit_products(matrix), matrix.num_blocks

    def body(n, x, weight, *extras_and_out):
        *extras, out = extras_and_out
        products.begin((x,), weight)
        row_units = temp((n + UNIT_ROWS - 1) // UNIT_ROWS, 1, "int64")

        per_task = products.blocks_per_task(row_units)
        num_groups = num_blocks if per_task is None else (num_blocks + per_task - 1) // per_task

        def task(index):
            group = temp(index // row_units, 1, "int64")
            begin = temp(index % row_units * UNIT_ROWS, 1, "int64")
            count = temp(T.min(n - begin, T.int64(UNIT_ROWS)), 1, "int64")
            addends = (extras[0] if bias else None, extras[-1] if residual else None)
            with products.unit(count, lambda row: begin + row) as sums:

                def multiply(block):
                    store_sums(matrix, sums(block), (block, begin, count), out, *addends)

                if per_task is None:
                    multiply(group)
                else:
                    first = temp(group * per_task, 1, "int64")
                    with T.serial(T.min(num_blocks - first, per_task)) as i:
                        multiply(temp(first + i, 1, "int64"))

        flops = n * (matrix.out_features * matrix.in_features)
        with products.scope():
            parallel_if(flops >= PARALLEL_FLOPS, row_units * num_groups, task)

    def arguments(n):
        return [
            ("x", (n, matrix.in_features), matrix.dtype),
            ("weight", matrix.shape, matrix.dtype),
            *([("bias", (matrix.out_features,), matrix.dtype)] if bias else []),
            *([("residual", (n, matrix.out_features), matrix.dtype)] if residual else []),
            ("out", (n, matrix.out_features), out_dtype),
        ]

    return rows_kernel(arguments, body, matrix.target)


@built_once
def embedding(matrix: PackedMatrix, scale: float = 1.0) -> tirx.PrimFunc:
    """Rows of a packed matrix times `scale`: ids int32 [n], packed weight, out [n, in_features]."""

    def body(n, ids, weight, out):
        with T.serial(n) as i, T.serial(T.int64(matrix.in_features)) as j:
            row = T.cast(ids[i], "int64")
            value = load(weight, matrix.index(row, j), 1)
            store(out, [i, j], 1, value if scale == 1.0 else value * T.float32(scale))

    def arguments(n):
        return [
            ("ids", (n,), "int32"),
            ("weight", matrix.shape, matrix.dtype),
            ("out", (n, matrix.in_features), matrix.dtype),
        ]

    return rows_kernel(arguments, body, matrix.target)
