# SPDX-License-Identifier: Apache-2.0
"""`GatedDeltaNet`: the recurrent layers of Qwen3-Next and Qwen3.5."""

from __future__ import annotations

from dataclasses import dataclass

from tvm.relax.frontend import nn
from tvm.relax.frontend.nn import op

from tvm_pagedkv.config import RecurrentConfig
from tvm_pagedkv.relax import PagedKVCacheObject

from ..config.decoder_config import DecoderConfig
from ..config.options import BuildOptions
from ..kernels.rows.state_kernels import delta_inputs, gated_norm
from ..weights.weight_parts import Output, Weights, channels, columns, rows, slices, vector
from .mixers import Mixer, share_of
from .projections import Linear, SplitLinear


@dataclass(frozen=True)
class GatedDeltaNet(Mixer):
    """A gated delta rule, as in Qwen3-Next and Qwen3.5.

    Parameters
    ----------
    spec, block, output_scale
        As for `Mixer`.
    fused : (str, str), optional
        One tensor for Q, K, V and the gate, and one for rates and decays, both with the rows of one
        head of K after another. None: they have four tensors.
    """

    fused: tuple[str, str] | None = None

    def build(
        self, config: DecoderConfig, options: BuildOptions, name: str, layer: int
    ) -> GatedDeltaNetBlock:
        return GatedDeltaNetBlock(self, config, options, name)

    def weights(self, config: DecoderConfig, ours: str, theirs: str) -> Weights:
        theirs = f"{theirs}.{self.block}"
        assert self.spec.recurrent is not None and self.spec.conv is not None
        spec, conv, hidden = self.spec.recurrent, self.spec.conv, config.hidden_size
        num_heads, v_width = spec.num_heads, spec.num_heads * spec.value_dim
        qkv, z, gates = _projections(spec, self.fused)
        yield from rows(f"{ours}.qkv", theirs, qkv, hidden)
        yield from rows(f"{ours}.z", theirs, z, hidden)
        yield from rows(f"{ours}.gates", theirs, gates, hidden)
        yield from channels(
            f"{ours}.conv", theirs, _heads("conv1d", spec), conv.width, bias=conv.has_bias
        )
        yield vector(f"{ours}.a_log", f"{theirs}.A_log", num_heads, split="rows")
        yield vector(f"{ours}.dt_bias", f"{theirs}.dt_bias", num_heads, split="rows")
        yield vector(f"{ours}.norm_weight", f"{theirs}.norm.weight", spec.value_dim)
        out = f"{ours}.out_proj", f"{theirs}.out_proj", (hidden, v_width)
        yield from columns(*out, scale=self.output_scale)


class GatedDeltaNetBlock(nn.Module):
    """A gated delta rule over convolved Q, K and V, then a norm of each head times a gate."""

    def __init__(
        self, part: GatedDeltaNet, config: DecoderConfig, options: BuildOptions, name: str
    ):
        layer = share_of(part.spec, options.num_shards)
        assert layer.recurrent is not None and layer.conv is not None
        spec, conv, hidden = layer.recurrent, layer.conv, config.hidden_size
        self.spec, self.options, self.epsilon = spec, options, config.norm_eps
        self.v_width = spec.num_heads * spec.value_dim
        self.qkv = Linear(hidden, conv.channels, options, name=f"{name}.qkv")
        self.z = Linear(hidden, self.v_width, options, name=f"{name}.z")
        self.gates = Linear(
            hidden, 2 * spec.num_heads, options, out_dtype="float32", name=f"{name}.gates"
        )
        self.conv_weight = nn.Parameter((conv.channels, conv.width), options.dtype)
        self.a_log = nn.Parameter((spec.num_heads,), "float32")
        self.dt_bias = nn.Parameter((spec.num_heads,), "float32")
        self.norm_weight = nn.Parameter((spec.value_dim,), "float32")
        width = self.v_width * options.num_shards
        self.out_proj = SplitLinear(width, hidden, options, name=f"{name}.out_proj")

    def forward(
        self, x: nn.Tensor, residual: nn.Tensor | None, cache: PagedKVCacheObject, layer: int
    ) -> nn.Tensor:
        spec, dtype, target, n = self.spec, self.options.dtype, self.options.vector, x.shape[0]
        placeholder = nn.Tensor.placeholder
        keys = placeholder((n, spec.num_key_heads, spec.key_dim), dtype)
        values = placeholder((n, spec.num_heads, spec.value_dim), dtype)
        gates = placeholder((n, spec.num_heads), "float32")
        mixed = cache.conv(layer, self.qkv(x), self.conv_weight)
        inputs = op.tensor_ir_op(
            delta_inputs(spec, dtype, target),
            "delta_inputs",
            [mixed, self.gates(x), self.a_log, self.dt_bias],
            [keys, keys, values, gates, gates],
        )
        out = cache.recurrent(layer, *inputs, scale=spec.key_dim**-0.5)
        heads = (spec.num_heads, spec.value_dim)
        norm = gated_norm(
            heads, spec.num_heads, "gate_last", self.epsilon, dtype, target, shares_weight=True
        )
        rows = placeholder((n, self.v_width), dtype)
        out = op.reshape(out, (n, self.v_width))
        gated = op.tensor_ir_op(norm, "gated_norm", [out, self.z(x), self.norm_weight], rows)
        return self.out_proj(gated, residual)


def _heads(name: str, spec: RecurrentConfig) -> list[Output]:
    """Return the rows of Q, K and V of a tensor. Workers share a single head of keys."""
    keys, values = spec.num_key_heads * spec.key_dim, spec.num_heads * spec.value_dim
    return _shared_keys(slices(name, keys, keys, values), spec)


def _shared_keys(qkv: list[Output], spec: RecurrentConfig) -> list[Output]:
    """Return the rows of Q, K and V, those of Q and K whole for each worker if K has one head."""
    q, k, v = qkv
    is_whole = spec.num_key_heads == 1
    return [q._replace(is_whole=is_whole), k._replace(is_whole=is_whole), v]


def _projections(spec: RecurrentConfig, fused: tuple[str, str] | None) -> tuple[list[Output], ...]:
    """Return the output features of Q, K and V, of the gate, and of rates and decays."""
    num_heads, num_keys, v_width = spec.num_heads, spec.num_key_heads, spec.value_dim
    if fused is None:
        rates = [Output("in_proj_b", num_heads), Output("in_proj_a", num_heads)]
        return _heads("in_proj_qkv", spec), [Output("in_proj_z", num_heads * v_width)], rates

    def of_key_heads(name: str, *widths: int) -> list[Output]:
        """Return the parts, of these widths, of what a tensor has for each head of K."""
        group, begins = sum(widths), [sum(widths[:i]) for i in range(len(widths))]
        return [
            Output(name, num_keys * width, begin, group, num_keys)
            for width, begin in zip(widths, begins, strict=True)
        ]

    share = num_heads // num_keys
    values = share * v_width
    *qkv, z = of_key_heads(fused[0], spec.key_dim, spec.key_dim, values, values)
    return _shared_keys(qkv, spec), [z], of_key_heads(fused[1], share, share)
