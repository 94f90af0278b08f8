# SPDX-License-Identifier: Apache-2.0
"""Linear layers of heads: each head multiplies its rows by a matrix of its own."""

from __future__ import annotations

from tvm import tirx
from tvm.relax.frontend import nn
from tvm.relax.frontend.nn import op
from tvm.script import tirx as T

from tir_kernels.cpu.isa.simd import store, temp

from ...config.options import BuildOptions
from ..rows.emit import built_once, parallel_if, rows_kernel
from .code_matrix import CodeMatrix
from .expert_linear import stacked_shape
from .packed import encoded_rows, packed_matrix
from .packed_layout import PackedMatrix
from .packed_products import PARALLEL_FLOPS, UNIT_ROWS
from .unit_products import unit_products
from .unit_sums import for_sums


class HeadLinear(nn.Module):
    """A projection by each head, into ``[n * num_heads, out_features]``."""

    def __init__(
        self, num_heads: int, in_features: int, out_features: int, options: BuildOptions, name: str
    ):
        self.num_heads, self.dtype = num_heads, options.dtype
        self.matrix = packed_matrix(f"{name}.weight", out_features, in_features, options)
        self.weight = nn.Parameter(stacked_shape(self.matrix, num_heads), self.matrix.dtype)

    def of_shared(self, x: nn.Tensor) -> nn.Tensor:
        """Return ``x[i] @ weight[head].T`` of x ``[n, in_features]``."""
        return self._multiply(x, x.shape[0] * self.num_heads, self.dtype, shares_rows=True)

    def of_each(self, x: nn.Tensor, out_dtype: str | None = None) -> nn.Tensor:
        """Return ``x[i, head] @ weight[head].T`` of x ``[n * num_heads, in_features]``."""
        return self._multiply(x, x.shape[0], out_dtype or self.dtype, shares_rows=False)

    def _multiply(self, x: nn.Tensor, num_rows, out_dtype: str, *, shares_rows: bool) -> nn.Tensor:
        kernel = head_linear(
            self.matrix, self.num_heads, x.dtype, out_dtype, shares_rows=shares_rows
        )
        out = nn.Tensor.placeholder((num_rows, self.matrix.out_features), out_dtype)
        inputs = [*encoded_rows(self.matrix, x), self.weight]
        return op.tensor_ir_op(kernel, "head_linear", inputs, out)


@built_once
def head_linear(
    matrix: PackedMatrix | CodeMatrix,
    num_heads: int,
    dtype: str,
    out_dtype: str,
    *,
    shares_rows: bool,
) -> tirx.PrimFunc:
    """Build the kernel of ``out[i * num_heads + head] = x[row] @ weight[head].T``.

    Row is i if heads share their rows, otherwise ``i * num_heads + head``.

    Arguments of the kernel: x [n, in_features] of `dtype`, or what `row_codes.encode_rows` makes of
    it if `matrix.multiplies_codes`; packed weights `stacked_shape`; out of `out_dtype`.
    """
    products = unit_products(matrix, dtype)
    num_rows, num_blocks = len(products.rows(1, dtype)), matrix.num_blocks

    def body(n, *buffers):
        x, (weight, out) = buffers[:num_rows], buffers[num_rows:]
        products.begin(x, weight)
        tokens = n if shares_rows else temp(n // num_heads, 1, "int64")
        row_units = temp((tokens + UNIT_ROWS - 1) // UNIT_ROWS, 1, "int64")

        def unit(index):
            stacked = temp(index // row_units, 1, "int64")
            head = temp(stacked // num_blocks, 1, "int64")
            block = temp(stacked % num_blocks, 1, "int64")
            begin = temp(index % row_units * UNIT_ROWS, 1, "int64")
            count = temp(T.min(tokens - begin, T.int64(UNIT_ROWS)), 1, "int64")

            def of_head(row):
                return (begin + row) * num_heads + head

            def write(row, column, value, lanes):
                store(out, (of_head(row), column), lanes, value)

            row_of = (lambda row: begin + row) if shares_rows else of_head
            with products.unit(count, row_of) as sums:
                for_sums(matrix, sums(stacked), block, count, write)

        flops = tokens * (num_heads * matrix.out_features * matrix.in_features)
        with products.scope():
            parallel_if(flops >= PARALLEL_FLOPS, row_units * (num_heads * num_blocks), unit)

    def arguments(n):
        rows = n * num_heads if shares_rows else n
        return [
            *products.rows(n, dtype),
            ("weight", stacked_shape(matrix, num_heads), matrix.dtype),
            ("out", (rows, matrix.out_features), out_dtype),
        ]

    return rows_kernel(arguments, body, matrix.target)
