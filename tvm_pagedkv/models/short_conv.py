# SPDX-License-Identifier: Apache-2.0
"""`ShortConv`: the double-gated convolution of LFM2."""

from __future__ import annotations

from collections.abc import Iterator

from tvm.relax.frontend import nn
from tvm.relax.frontend.nn import op

from ..config import LayerSpec
from ..relax import PagedKVCacheObject
from . import kernels
from .config import DecoderConfig
from .options import BuildOptions
from .projections import Linear
from .weight_parts import Output, Weight, columns, rows, vector


class ShortConv(nn.Module):
    """``out(C * conv(B * x))``, where B, C and x are projections of the layer's input."""

    def __init__(self, config: DecoderConfig, options: BuildOptions, layer: LayerSpec, name: str):
        assert layer.conv is not None
        self.conv, self.options = layer.conv, options
        width, channels, bias = config.hidden_size, layer.conv.channels, layer.conv.has_bias
        self.inner = Linear(width, 2 * channels, options, bias, name=f"{name}.inner")
        self.outer = Linear(width, channels, options, bias, name=f"{name}.outer")
        self.conv_weight = nn.Parameter((channels, layer.conv.width), options.dtype)
        self.conv_bias = nn.Parameter((channels,), options.dtype) if bias else None
        self.out_proj = Linear(channels, width, options, bias, name=f"{name}.out_proj")

    def forward(
        self, x: nn.Tensor, residual: nn.Tensor | None, cache: PagedKVCacheObject, layer: int
    ) -> nn.Tensor:
        how = self.conv.channels, self.options.dtype, self.options.vector
        rows = nn.Tensor.placeholder((x.shape[0], self.conv.channels), self.options.dtype)
        product = kernels.gated("identity", *how)
        inner = op.tensor_ir_op(product, "gated", [self.inner(x)], rows)
        mixed = cache.conv(layer, inner, self.conv_weight, self.conv_bias)
        product = kernels.multiply("identity", *how)
        gated = op.tensor_ir_op(product, "multiply", [mixed, self.outer(x)], rows)
        return self.out_proj(gated, residual)

    @staticmethod
    def weights(
        config: DecoderConfig, layer: LayerSpec, ours: str, theirs: str
    ) -> Iterator[tuple[str, Weight]]:
        """Yield the name and the source of every weight."""
        assert layer.conv is not None
        width, channels, bias = config.hidden_size, layer.conv.channels, layer.conv.has_bias
        b, c, x = (Output("in_proj", channels, i * channels, 3 * channels) for i in range(3))
        yield from rows(f"{ours}.inner", theirs, [b, x], width, bias=bias)
        yield from rows(f"{ours}.outer", theirs, [c], width, bias=bias)
        yield vector(f"{ours}.conv_weight", f"{theirs}.conv.weight", channels, 1, layer.conv.width)
        if bias:
            yield vector(f"{ours}.conv_bias", f"{theirs}.conv.bias", channels)
        shape = (width, channels)
        yield from columns(
            f"{ours}.out_proj", f"{theirs}.out_proj", shape, bias=bias, scale=config.scales.mixer
        )
