# SPDX-License-Identifier: Apache-2.0
"""`ShortConv`: the double-gated convolution of LFM2."""

from __future__ import annotations

from dataclasses import dataclass

from tvm.relax.frontend import nn
from tvm.relax.frontend.nn import op

from tvm_pagedkv.relax import PagedKVCacheObject

from ..config.decoder_config import DecoderConfig
from ..config.options import BuildOptions
from ..kernels.rows import gates
from ..weights.weight_parts import Output, Weights, channels, columns, rows, slices
from .mixers import Mixer, share_of
from .projections import Linear, SplitLinear


@dataclass(frozen=True)
class ShortConv(Mixer):
    """A convolution between two gates, as in LFM2."""

    def build(
        self, config: DecoderConfig, options: BuildOptions, name: str, layer: int
    ) -> ShortConvBlock:
        return ShortConvBlock(self, config, options, name)

    def weights(self, config: DecoderConfig, ours: str, theirs: str) -> Weights:
        theirs = f"{theirs}.{self.block}"
        assert self.spec.conv is not None
        width, conv = config.hidden_size, self.spec.conv
        num_channels, bias = conv.channels, conv.has_bias
        b, c, x = slices("in_proj", *[num_channels] * 3)
        yield from rows(f"{ours}.inner", theirs, [b, x], width, bias=bias)
        yield from rows(f"{ours}.outer", theirs, [c], width, bias=bias)
        convolved = [Output("conv", num_channels)]
        yield from channels(f"{ours}.conv", theirs, convolved, conv.width, bias=bias)
        shape = (width, num_channels)
        yield from columns(
            f"{ours}.out_proj", f"{theirs}.out_proj", shape, bias=bias, scale=self.output_scale
        )


class ShortConvBlock(nn.Module):
    """``out(C * conv(B * x))``, where B, C and x are projections of the layer's input."""

    def __init__(self, part: ShortConv, config: DecoderConfig, options: BuildOptions, name: str):
        layer = share_of(part.spec, options.num_shards)
        assert layer.conv is not None
        self.conv, self.options = layer.conv, options
        width, own, bias = config.hidden_size, layer.conv.channels, layer.conv.has_bias
        self.inner = Linear(width, 2 * own, options, bias, name=f"{name}.inner")
        self.outer = Linear(width, own, options, bias, name=f"{name}.outer")
        self.conv_weight = nn.Parameter((own, layer.conv.width), options.dtype)
        self.conv_bias = nn.Parameter((own,), options.dtype) if bias else None
        self.out_proj = SplitLinear(
            own * options.num_shards, width, options, bias, name=f"{name}.out_proj"
        )

    def forward(
        self, x: nn.Tensor, residual: nn.Tensor | None, cache: PagedKVCacheObject, layer: int
    ) -> nn.Tensor:
        how = self.conv.channels, self.options.dtype, self.options.vector
        rows = nn.Tensor.placeholder((x.shape[0], self.conv.channels), self.options.dtype)
        product = gates.gated("identity", *how)
        inner = op.tensor_ir_op(product, "gated", [self.inner(x)], rows)
        mixed = cache.conv(layer, inner, self.conv_weight, self.conv_bias)
        product = gates.multiply("identity", *how)
        gated = op.tensor_ir_op(product, "multiply", [mixed, self.outer(x)], rows)
        return self.out_proj(gated, residual)
