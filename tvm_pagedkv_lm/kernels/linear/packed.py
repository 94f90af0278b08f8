# SPDX-License-Identifier: Apache-2.0
"""Matrices of a model in their packed layout, quantized or not: what `nn` modules do with them."""

from __future__ import annotations

from tvm.relax.frontend import nn
from tvm.relax.frontend.nn import op

from ...config.options import BuildOptions
from .code_embedding import code_embedding
from .code_matrix import CodeMatrix
from .linear import embedding, linear
from .packed_layout import PackedMatrix
from .row_codes import ROW_BYTES, encode_rows


def packed_matrix(
    name: str, out_features: int, in_features: int, options: BuildOptions
) -> PackedMatrix | CodeMatrix:
    """Return the layout of the weight of this name."""
    format = options.format_of(name)
    if format is not None:
        return CodeMatrix(out_features, in_features, format, options.vector)
    return PackedMatrix(out_features, in_features, options.dtype, options.vector)


def multiply(
    matrix: PackedMatrix | CodeMatrix,
    x: nn.Tensor,
    weight: nn.Tensor,
    bias: nn.Tensor | None,
    residual: nn.Tensor | None,
    out_dtype: str,
) -> nn.Tensor:
    """Return ``x @ weight.T (+ bias) (+ residual)``."""
    chosen = {"bias": bias is not None, "residual": residual is not None}
    kernel = linear(matrix, x.dtype, out_dtype, **chosen)
    inputs = [
        *encoded_rows(matrix, x),
        weight,
        *(each for each in (bias, residual) if each is not None),
    ]
    out = nn.Tensor.placeholder((x.shape[0], matrix.out_features), out_dtype)
    return op.tensor_ir_op(kernel, "linear", inputs, out)


def encoded_rows(matrix: PackedMatrix | CodeMatrix, x: nn.Tensor) -> list[nn.Tensor]:
    """Return rows as they are multiplied: as they are, or their codes, scales and sums."""
    if isinstance(matrix, PackedMatrix) or not matrix.multiplies_codes:
        return [x]
    n, num_groups = x.shape[0], matrix.num_groups
    outs = [
        nn.Tensor.placeholder((n, num_groups, ROW_BYTES), "uint8"),
        nn.Tensor.placeholder((n, num_groups), "float32"),
        nn.Tensor.placeholder((n, num_groups), "int32"),
    ]
    kernel = encode_rows(matrix.in_features, x.dtype, as_words=matrix.multiplies_words)
    return list(op.tensor_ir_op(kernel, "encode_rows", [x], outs))


def look_up(
    matrix: PackedMatrix | CodeMatrix, ids: nn.Tensor, weight: nn.Tensor, dtype: str, scale: float
) -> nn.Tensor:
    """Return the rows `ids` of a matrix times `scale`."""
    if isinstance(matrix, PackedMatrix):
        kernel = embedding(matrix, scale)
    else:
        kernel = code_embedding(matrix, dtype, scale)
    out = nn.Tensor.placeholder((ids.shape[0], matrix.in_features), dtype)
    return op.tensor_ir_op(kernel, "embedding", [ids, weight], out)
