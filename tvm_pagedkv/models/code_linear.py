# SPDX-License-Identifier: Apache-2.0
"""Kernels of linear layers with quantized weights; `code_matrix` has their layout.

CPUs with dot products of bytes or of words multiply the codes; `row_codes` has the activations.
Other CPUs convert the codes of a few groups to float32 numbers, which stay in the L1 cache while
they are multiplied with all `UNIT_ROWS` rows.
"""

from __future__ import annotations

from tvm import tirx
from tvm.script import tirx as T

from tir_kernels.cpu.simd import temp

from .code_matrix import CodeMatrix
from .code_sums import CodeSums
from .emit import built_once, parallel_if, rows_kernel
from .packed_products import PARALLEL_FLOPS, UNIT_ROWS
from .unit_sums import store_sums


@built_once
def code_linear(
    matrix: CodeMatrix, dtype: str, out_dtype: str, *, bias: bool = False, residual: bool = False
) -> tirx.PrimFunc:
    """Build the kernel of ``out = x @ weight.T (+ bias) (+ residual)``, summed in float32.

    Arguments of the kernel: x, packed weight, bias [out_features] and residual [n, out_features] of
    `dtype` where chosen, out [n, out_features] of `out_dtype`. If `matrix.multiplies_codes`, x is
    the three results of `row_codes.encode_rows`, otherwise [n, in_features] of `dtype`.
    """
    products = CodeSums(matrix)
    num_outputs = matrix.out_features
    num_rows = len(products.rows(1, dtype))

    def body(n, *buffers):
        x, (weight, *extras, out) = buffers[:num_rows], buffers[num_rows:]
        products.begin(x, weight)
        row_units = temp((n + UNIT_ROWS - 1) // UNIT_ROWS, 1, "int64")

        def unit(index):
            block = temp(index // row_units, 1, "int64")
            begin = temp(index % row_units * UNIT_ROWS, 1, "int64")
            count = temp(T.min(n - begin, T.int64(UNIT_ROWS)), 1, "int64")
            addends = (extras[0] if bias else None, extras[-1] if residual else None)
            with products.unit(count, lambda row: begin + row) as sums:
                store_sums(matrix, sums(block), (block, begin, count), out, *addends)

        flops = n * (num_outputs * matrix.in_features)
        with products.scope():
            parallel_if(flops >= PARALLEL_FLOPS, row_units * matrix.num_blocks, unit)

    def arguments(n):
        return [
            *products.rows(n, dtype),
            ("weight", matrix.shape, "uint8"),
            *([("bias", (num_outputs,), dtype)] if bias else []),
            *([("residual", (n, num_outputs), dtype)] if residual else []),
            ("out", (n, num_outputs), out_dtype),
        ]

    return rows_kernel(arguments, body, matrix.target)
