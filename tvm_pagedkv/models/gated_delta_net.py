# SPDX-License-Identifier: Apache-2.0
"""`GatedDeltaNet`: the recurrent layers of Qwen3.5."""

from __future__ import annotations

from collections.abc import Iterator

from tvm.relax.frontend import nn
from tvm.relax.frontend.nn import op

from ..config import LayerSpec, RecurrentConfig
from ..relax import PagedKVCacheObject
from .config import DecoderConfig
from .options import BuildOptions
from .projections import Linear, SplitLinear
from .state_kernels import delta_inputs, gated_norm
from .weight_parts import Output, Weight, channels, columns, rows, slices, vector


class GatedDeltaNet(nn.Module):
    """A gated delta rule over convolved Q, K and V, then a norm of each head times a gate."""

    def __init__(self, config: DecoderConfig, options: BuildOptions, layer: LayerSpec, name: str):
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

    @staticmethod
    def weights(
        config: DecoderConfig, layer: LayerSpec, ours: str, theirs: str
    ) -> Iterator[tuple[str, Weight]]:
        """Yield the name and the source of every weight."""
        assert layer.recurrent is not None and layer.conv is not None
        spec, conv, hidden = layer.recurrent, layer.conv, config.hidden_size
        num_heads, v_width = spec.num_heads, spec.num_heads * spec.value_dim
        gates = [Output("in_proj_b", num_heads), Output("in_proj_a", num_heads)]
        qkv = _heads("in_proj_qkv", spec)
        yield from rows(f"{ours}.qkv", theirs, qkv, hidden)
        yield from rows(f"{ours}.z", theirs, [Output("in_proj_z", v_width)], hidden)
        yield from rows(f"{ours}.gates", theirs, gates, hidden)
        yield from channels(
            f"{ours}.conv", theirs, _heads("conv1d", spec), conv.width, bias=conv.has_bias
        )
        yield vector(f"{ours}.a_log", f"{theirs}.A_log", num_heads, split="rows")
        yield vector(f"{ours}.dt_bias", f"{theirs}.dt_bias", num_heads, split="rows")
        yield vector(f"{ours}.norm_weight", f"{theirs}.norm.weight", spec.value_dim)
        out = f"{ours}.out_proj", f"{theirs}.out_proj", (hidden, v_width)
        yield from columns(*out, scale=config.scales.mixer)


def _heads(name: str, spec: RecurrentConfig) -> list[Output]:
    """Return the rows of Q, K and V of a tensor. Workers share a single head of keys."""
    keys, values = spec.num_key_heads * spec.key_dim, spec.num_heads * spec.value_dim
    q, k, v = slices(name, keys, keys, values)
    is_whole = spec.num_key_heads == 1
    return [q._replace(is_whole=is_whole), k._replace(is_whole=is_whole), v]
