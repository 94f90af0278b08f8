# SPDX-License-Identifier: Apache-2.0
"""`KimiDelta`: the recurrent layers of Kimi Linear (KDA)."""

from __future__ import annotations

from dataclasses import dataclass

from tvm.relax.frontend import nn
from tvm.relax.frontend.nn import op

from tvm_pagedkv.relax import PagedKVCacheObject

from ..config.decoder_config import DecoderConfig
from ..config.options import BuildOptions
from ..kernels.rows.channel_decay import kimi_inputs
from ..kernels.rows.state_kernels import gated_norm
from ..weights.weight_parts import Output, Weights, channels, columns, rows, vector
from .mixers import Mixer, share_of
from .projections import Linear, SplitLinear


@dataclass(frozen=True)
class KimiDelta(Mixer):
    """A delta rule whose channels decay by themselves, as in Kimi Linear."""

    @property
    def whole_because(self) -> str | None:
        return "workers do not share delta nets whose channels decay by themselves (Kimi Linear)"

    def build(
        self, config: DecoderConfig, options: BuildOptions, name: str, layer: int
    ) -> KimiDeltaBlock:
        return KimiDeltaBlock(self, config, options, name)

    def weights(self, config: DecoderConfig, ours: str, theirs: str) -> Weights:
        theirs = f"{theirs}.{self.block}"
        assert self.spec.recurrent is not None and self.spec.conv is not None
        spec, conv, hidden = self.spec.recurrent, self.spec.conv, config.hidden_size
        heads, rank, width = spec.num_heads, spec.key_dim, spec.num_heads * spec.key_dim
        qkv = [Output(f"{name}_proj", width) for name in "qkv"]
        yield from rows(f"{ours}.qkv", theirs, qkv, hidden)
        yield from rows(f"{ours}.rates", theirs, [Output("b_proj", heads)], hidden)
        for name, tensor in (("decay", "f"), ("gate", "g")):
            down, up = Output(f"{tensor}_a_proj", rank), Output(f"{tensor}_b_proj", width)
            yield from rows(f"{ours}.{name}_down", theirs, [down], hidden, is_split=False)
            yield from rows(f"{ours}.{name}_up", theirs, [up], rank)
        convolved = [Output(f"{name}_conv1d", width) for name in "qkv"]
        yield from channels(f"{ours}.conv", theirs, convolved, conv.width, bias=conv.has_bias)
        yield vector(f"{ours}.a_log", f"{theirs}.A_log", 1, 1, heads, 1)
        yield vector(f"{ours}.dt_bias", f"{theirs}.dt_bias", width, split="rows")
        yield vector(f"{ours}.norm_weight", f"{theirs}.o_norm.weight", spec.value_dim)
        out = f"{theirs}.o_proj"
        yield from columns(f"{ours}.o_proj", out, (hidden, width), scale=self.output_scale)


class KimiDeltaBlock(nn.Module):
    """A delta rule whose channels decay by themselves, then a norm of each head times a gate.

    Decays and the gate have projections of low rank.
    """

    def __init__(self, part: KimiDelta, config: DecoderConfig, options: BuildOptions, name: str):
        layer = share_of(part.spec, options.num_shards)
        assert layer.recurrent is not None and layer.conv is not None
        spec, conv, hidden = layer.recurrent, layer.conv, config.hidden_size
        self.spec, self.options, self.epsilon = spec, options, config.norm_eps
        self.width, rank = spec.num_heads * spec.key_dim, spec.key_dim

        def linear(width: int, out: int, part: str, out_dtype: str | None = None) -> Linear:
            return Linear(width, out, options, out_dtype=out_dtype, name=f"{name}.{part}")

        self.qkv = linear(hidden, conv.channels, "qkv")
        self.rates = linear(hidden, spec.num_heads, "rates", "float32")
        self.decay_down = linear(hidden, rank, "decay_down")
        self.decay_up = linear(rank, self.width, "decay_up", "float32")
        self.gate_down = linear(hidden, rank, "gate_down")
        self.gate_up = linear(rank, self.width, "gate_up")
        self.conv_weight = nn.Parameter((conv.channels, conv.width), options.dtype)
        self.a_log = nn.Parameter((spec.num_heads,), "float32")
        self.dt_bias = nn.Parameter((self.width,), "float32")
        self.norm_weight = nn.Parameter((spec.value_dim,), "float32")
        width = self.width * options.num_shards
        self.o_proj = SplitLinear(width, hidden, options, name=f"{name}.o_proj")

    def forward(
        self, x: nn.Tensor, residual: nn.Tensor | None, cache: PagedKVCacheObject, layer: int
    ) -> nn.Tensor:
        spec, dtype, target, n = self.spec, self.options.dtype, self.options.vector, x.shape[0]
        placeholder = nn.Tensor.placeholder
        heads = placeholder((n, spec.num_heads, spec.key_dim), dtype)
        decays = placeholder((n, spec.num_heads, spec.key_dim), "float32")
        mixed = cache.conv(layer, self.qkv(x), self.conv_weight)
        inputs = op.tensor_ir_op(
            kimi_inputs(spec, dtype, target),
            "kimi_inputs",
            [mixed, self.rates(x), self.decay_up(self.decay_down(x)), self.a_log, self.dt_bias],
            [heads, heads, heads, decays, placeholder((n, spec.num_heads), "float32")],
        )
        out = cache.recurrent(layer, *inputs, scale=spec.key_dim**-0.5)
        norm = gated_norm(
            (spec.num_heads, spec.value_dim),
            spec.num_heads,
            "gate_last",
            self.epsilon,
            dtype,
            target,
            shares_weight=True,
            activation="sigmoid",
        )
        gate = self.gate_up(self.gate_down(x))
        inputs = [op.reshape(out, (n, self.width)), gate, self.norm_weight]
        gated = op.tensor_ir_op(norm, "gated_norm", inputs, placeholder((n, self.width), dtype))
        return self.o_proj(gated, residual)
