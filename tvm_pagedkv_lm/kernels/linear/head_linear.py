# SPDX-License-Identifier: Apache-2.0
"""Linear layers of heads: each head multiplies its rows by a matrix of its own."""

from functools import partial
from operator import add

from tvm.relax.frontend import nn
from tvm.relax.frontend.nn import op
from tvm.script import tirx as T

from tir_kernels.script import opened, prim_func

from ...config.options import BuildOptions
from ..define import attributes, built_once, matcher, parallel_if
from .code_matrix import CodeMatrix
from .expert_linear import stacked_shape
from .packed import encoded_rows, packed_matrix
from .packed_layout import PackedMatrix
from .packed_products import PARALLEL_FLOPS, TASK_ROWS
from .products import products_for
from .stored_sums import Output, store_sums


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
):
    """Build the kernel of ``out[i * num_heads + head] = x[row] @ weight[head].T``.

    Row is i if heads share their rows, otherwise ``i * num_heads + head``.

    Arguments of the kernel: x [n, in_features] of `dtype`, or what `row_codes.encode_rows` makes of
    it if `matrix.multiplies_codes`; packed weights `stacked_shape`; out of `out_dtype`.
    """
    products = products_for(matrix, dtype)
    num_blocks, out_features, target = matrix.num_blocks, matrix.out_features, matrix.target
    match_weight, match_out = matcher(target, matrix.dtype), matcher(target, out_dtype)

    @prim_func(absent=products.unused_rows)
    def head_linear(
        var_x: T.handle,
        var_x_scales: T.handle,
        var_x_sums: T.handle,
        var_weight: T.handle,
        var_out: T.handle,
    ):
        T.func_attr(attributes(target))
        n = T.int64()
        x = T.meta_var(products.match_rows(n, dtype, var_x, var_x_scales, var_x_sums))
        weight = match_weight(var_weight, *stacked_shape(matrix, num_heads))
        out = match_out(var_out, n * num_heads if shares_rows else n, out_features)
        products.begin(x, weight)
        products.open_scope()
        tokens = n if shares_rows else n // num_heads
        row_tasks = (tokens + TASK_ROWS - 1) // TASK_ROWS
        flops = T.meta_var(tokens * (num_heads * out_features * matrix.in_features))
        for task in parallel_if(flops >= PARALLEL_FLOPS, row_tasks * (num_heads * num_blocks)):
            stacked = task // row_tasks
            head, block = stacked // num_blocks, stacked % num_blocks
            begin = task % row_tasks * TASK_ROWS
            count = T.min(tokens - begin, TASK_ROWS)
            of_head = T.meta_var(partial(_row_of_head, begin, num_heads, head))
            row_of = T.meta_var(partial(add, begin) if shares_rows else of_head)
            output = T.meta_var(Output(out, of_head))
            sums = T.meta_var(opened(products.task(count, row_of)))
            store_sums(matrix, sums(stacked), block, count, output)

    return head_linear


def _row_of_head(begin, num_heads: int, head, row):
    """Return the row of a head that row `row` of a task is."""
    return (begin + row) * num_heads + head
