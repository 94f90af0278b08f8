# SPDX-License-Identifier: Apache-2.0
"""Kernels of linear layers with quantized weights; `code_matrix` has their layout.

CPUs with dot products of bytes or of words multiply the codes; `row_codes` has the activations.
Other CPUs convert the codes of a few groups to float32 numbers, which stay in the L1 cache while
they are multiplied with all `UNIT_ROWS` rows. With AMX, the codes of many groups become bfloat16
numbers, which are multiplied with many rows of a bfloat16 model in tiles.
"""

from __future__ import annotations

from tvm import tirx

from ..rows.emit import built_once, rows_kernel
from .code_matrix import CodeMatrix
from .unit_products import multiply_units, unit_products


@built_once
def code_linear(
    matrix: CodeMatrix, dtype: str, out_dtype: str, *, bias: bool = False, residual: bool = False
) -> tirx.PrimFunc:
    """Build the kernel of ``out = x @ weight.T (+ bias) (+ residual)``, summed in float32.

    Arguments of the kernel: x, packed weight, bias [out_features] and residual [n, out_features] of
    `dtype` where chosen, out [n, out_features] of `out_dtype`. If `matrix.multiplies_codes`, x is
    the three results of `row_codes.encode_rows`, otherwise [n, in_features] of `dtype`.
    """
    products = unit_products(matrix, dtype)
    num_outputs = matrix.out_features
    num_rows = len(products.rows(1, dtype))

    def body(n, *buffers):
        x, (weight, *extras, out) = buffers[:num_rows], buffers[num_rows:]
        products.begin(x, weight)
        addends = (extras[0] if bias else None, extras[-1] if residual else None)
        multiply_units(products, n, out, *addends)

    def arguments(n):
        return [
            *products.rows(n, dtype),
            ("weight", matrix.shape, "uint8"),
            *([("bias", (num_outputs,), dtype)] if bias else []),
            *([("residual", (n, num_outputs), dtype)] if residual else []),
            ("out", (n, num_outputs), out_dtype),
        ]

    return rows_kernel(arguments, body, matrix.target)
