# SPDX-License-Identifier: Apache-2.0
"""`ShortConv`: the double-gated convolution of LFM2."""

from __future__ import annotations

from collections.abc import Iterator

from tvm.relax.frontend import nn
from tvm.relax.frontend.nn import op

from tvm_pagedkv.config import LayerSpec
from tvm_pagedkv.relax import PagedKVCacheObject

from ..config.decoder_config import DecoderConfig
from ..config.options import BuildOptions
from ..kernels.rows import row_kernels as kernels
from ..weights.weight_parts import Output, Weight, channels, columns, rows, slices
from .projections import Linear, SplitLinear


class ShortConv(nn.Module):
    """``out(C * conv(B * x))``, where B, C and x are projections of the layer's input."""

    def __init__(self, config: DecoderConfig, options: BuildOptions, layer: LayerSpec, name: str):
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
        width, num_channels, bias = config.hidden_size, layer.conv.channels, layer.conv.has_bias
        b, c, x = slices("in_proj", *[num_channels] * 3)
        yield from rows(f"{ours}.inner", theirs, [b, x], width, bias=bias)
        yield from rows(f"{ours}.outer", theirs, [c], width, bias=bias)
        convolved = [Output("conv", num_channels)]
        yield from channels(f"{ours}.conv", theirs, convolved, layer.conv.width, bias=bias)
        shape = (width, num_channels)
        yield from columns(
            f"{ours}.out_proj", f"{theirs}.out_proj", shape, bias=bias, scale=config.scales.mixer
        )
