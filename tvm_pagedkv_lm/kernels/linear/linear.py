# SPDX-License-Identifier: Apache-2.0
"""Linear layers: the kernels that multiply with packed weights or look up their rows."""

from __future__ import annotations

from tvm import tirx
from tvm.script import tirx as T

from tir_kernels.cpu.isa.simd import load, store

from ..rows.emit import built_once, rows_kernel
from .packed_layout import PackedMatrix
from .unit_products import multiply_units, unit_products


@built_once
def linear(
    matrix: PackedMatrix, out_dtype: str, *, bias: bool = False, residual: bool = False
) -> tirx.PrimFunc:
    """``out = x @ weight.T (+ bias) (+ residual)``, accumulated in float32.

    Arguments of the kernel: x [n, in_features], packed weight, bias [out_features] and residual
    [n, out_features] where chosen, out [n, out_features] of `out_dtype`.
    """
    products = unit_products(matrix, matrix.dtype)

    def body(n, x, weight, *extras_and_out):
        *extras, out = extras_and_out
        products.begin((x,), weight)
        addends = (extras[0] if bias else None, extras[-1] if residual else None)
        multiply_units(products, n, out, *addends)

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
