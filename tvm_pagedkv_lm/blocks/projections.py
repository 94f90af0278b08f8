# SPDX-License-Identifier: Apache-2.0
"""Projections of a decoder in ``tvm.relax.frontend.nn``: products with packed weights."""

from __future__ import annotations

from tvm.relax.frontend import nn
from tvm.relax.frontend.nn import op

from ..config.options import BuildOptions
from ..kernels.linear.packed import multiply, packed_matrix


class Linear(nn.Module):
    """``x @ weight.T (+ bias) (+ residual)`` with packed weights, for x ``[n, in_features]``.

    Its name tells `BuildOptions` whether the weights are quantized.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        options: BuildOptions,
        bias: bool = False,
        out_dtype: str | None = None,
        *,
        name: str,
    ):
        self.options, self.out_dtype = options, out_dtype or options.dtype
        self.matrix = packed_matrix(f"{name}.weight", out_features, in_features, options)
        self.weight = nn.Parameter(self.matrix.shape, self.matrix.dtype)
        self.bias = nn.Parameter((out_features,), options.dtype) if bias else None

    def forward(self, x: nn.Tensor, residual: nn.Tensor | None = None) -> nn.Tensor:
        return multiply(self.matrix, x, self.weight, self.bias, residual, self.out_dtype)


class SplitLinear(Linear):
    """`Linear` over the worker's share of the input features, followed by an all-reduce."""

    def __init__(
        self,
        in_features: int,
        out_features: int,
        options: BuildOptions,
        bias: bool = False,
        *,
        name: str,
    ):
        out_dtype = "float32" if options.num_shards > 1 else None
        share = in_features // options.num_shards
        super().__init__(share, out_features, options, bias, out_dtype, name=name)

    def forward(self, x: nn.Tensor, residual: nn.Tensor | None = None) -> nn.Tensor:
        if self.options.num_shards == 1:
            return super().forward(x, residual)
        total = op.ccl_allreduce(super().forward(x), "sum")
        if residual is not None:
            total = op.astype(residual, "float32") + total
        return op.astype(total, self.options.dtype)
