# SPDX-License-Identifier: Apache-2.0
"""`Mamba2`: the recurrent layers of Mamba2, Falcon-H1 and Granite 4 H."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from tvm.relax.frontend import nn
from tvm.relax.frontend.nn import op

from tvm_pagedkv.config import RecurrentConfig
from tvm_pagedkv.relax import PagedKVCacheObject

from ..config.decoder_config import DecoderConfig
from ..config.options import BuildOptions
from ..kernels.rows.shared_norm import shared_norm
from ..kernels.rows.state_kernels import gated_norm, mamba2_inputs
from ..weights.weight_parts import Output, Weights, channels, columns, rows, slices, vector
from .mixers import Mixer, share_of
from .projections import Linear, SplitLinear


@dataclass(frozen=True)
class Mamba2(Mixer):
    """A state-space recurrence, as in Mamba2, Falcon-H1 and Granite 4 H.

    Parameters
    ----------
    spec, block, output_scale
        As for `Mixer`.
    norm : {"gate_first", "gate_last"}, optional
        The RMS norm of the output, which applies after or before the gate; None: the gate alone.
    time_step_limit : (float, float)
        Bounds of the time step.
    in_bias, out_bias : bool
        Whether the projections have biases.
    in_scales : tuple of 5 floats
        Factors on the gate, x, B, C and the time step, before the convolution.
    """

    norm: str | None = "gate_first"
    time_step_limit: tuple[float, float] = (0.0, math.inf)
    in_bias: bool = False
    out_bias: bool = False
    in_scales: tuple[float, ...] = (1.0,) * 5

    def build(
        self, config: DecoderConfig, options: BuildOptions, name: str, layer: int
    ) -> Mamba2Block:
        return Mamba2Block(self, config, options, name)

    def weights(self, config: DecoderConfig, ours: str, theirs: str) -> Weights:
        theirs = f"{theirs}.{self.block}"
        assert self.spec.recurrent is not None and self.spec.conv is not None
        spec, conv, hidden = self.spec.recurrent, self.spec.conv, config.hidden_size
        num_heads, width = spec.num_heads, spec.num_heads * spec.value_dim
        key_width = spec.num_key_heads * spec.key_dim
        widths = (width, width, key_width, key_width, num_heads)
        z, *xbc, dt = slices("in_proj", *widths, scales=self.in_scales)
        xbc = _for_workers(xbc, spec)
        for name, outputs in (("z", [z]), ("xbc", xbc), ("gates", [dt])):
            yield from rows(f"{ours}.{name}", theirs, outputs, hidden, bias=self.in_bias)
        convolved = _for_workers(slices("conv1d", width, key_width, key_width), spec)
        yield from channels(f"{ours}.conv", theirs, convolved, conv.width, bias=conv.has_bias)
        for name, tensor in (("a_log", "A_log"), ("dt_bias", "dt_bias"), ("d", "D")):
            yield vector(f"{ours}.{name}", f"{theirs}.{tensor}", num_heads, split="rows")
        if self.norm:
            yield vector(f"{ours}.norm_weight", f"{theirs}.norm.weight", width, split="rows")
        yield from columns(
            f"{ours}.out_proj",
            f"{theirs}.out_proj",
            (hidden, width),
            bias=self.out_bias,
            scale=self.output_scale,
        )


class Mamba2Block(nn.Module):
    """A state-space recurrence over convolved x, B and C, then a gate and a norm."""

    def __init__(self, part: Mamba2, config: DecoderConfig, options: BuildOptions, name: str):
        layer = share_of(part.spec, options.num_shards)
        assert layer.recurrent is not None and layer.conv is not None
        spec, conv, hidden = layer.recurrent, layer.conv, config.hidden_size
        self.spec, self.options, self.own = spec, options, part
        self.epsilon, self.channels = config.norm_eps, conv.channels
        self.width = spec.num_heads * spec.value_dim
        self.norm_spans_workers = bool(part.norm) and _divides_a_group(part, options)
        in_bias, out_bias = part.in_bias, part.out_bias
        self.z = Linear(hidden, self.width, options, in_bias, name=f"{name}.z")
        self.xbc = Linear(hidden, conv.channels, options, in_bias, name=f"{name}.xbc")
        self.gates = Linear(
            hidden, spec.num_heads, options, in_bias, "float32", name=f"{name}.gates"
        )
        self.conv_weight = nn.Parameter((conv.channels, conv.width), options.dtype)
        self.conv_bias = nn.Parameter((conv.channels,), options.dtype) if conv.has_bias else None
        self.a_log = nn.Parameter((spec.num_heads,), "float32")
        self.dt_bias = nn.Parameter((spec.num_heads,), "float32")
        self.d = nn.Parameter((spec.num_heads,), "float32")
        self.norm_weight = nn.Parameter((self.width,), "float32") if self.own.norm else None
        self.out_proj = SplitLinear(
            self.width * options.num_shards, hidden, options, out_bias, name=f"{name}.out_proj"
        )

    def forward(
        self, x: nn.Tensor, residual: nn.Tensor | None, cache: PagedKVCacheObject, layer: int
    ) -> nn.Tensor:
        spec, dtype, target, n = self.spec, self.options.dtype, self.options.vector, x.shape[0]
        placeholder = nn.Tensor.placeholder
        keys = placeholder((n, spec.num_key_heads, spec.key_dim), dtype)
        values = placeholder((n, spec.num_heads, spec.value_dim), dtype)
        mixed = cache.conv(layer, self.xbc(x), self.conv_weight, self.conv_bias)
        q, k, v, log_decay = op.tensor_ir_op(
            mamba2_inputs(spec, self.own.time_step_limit, dtype, target),
            "mamba2_inputs",
            [mixed, self.gates(x), self.a_log, self.dt_bias],
            [keys, keys, values, placeholder((n, spec.num_heads), "float32")],
        )
        out = op.reshape(cache.recurrent(layer, q, k, v, log_decay), (n, self.width))
        return self.out_proj(self._gate(out, self.z(x), mixed), residual)

    def _gate(self, out: nn.Tensor, gate: nn.Tensor, mixed: nn.Tensor) -> nn.Tensor:
        """Return the output with its skip connection, gate and norm."""
        spec, dtype, target = self.spec, self.options.dtype, self.options.vector
        heads, inputs = (spec.num_heads, spec.value_dim), [out, gate, mixed, self.d]
        if self.norm_weight is not None:
            inputs.append(self.norm_weight)
        if self.norm_spans_workers:
            assert self.own.norm is not None
            num_shards = self.options.num_shards
            return shared_norm(
                inputs, heads, self.own.norm, self.epsilon, num_shards, dtype, target
            )
        norm = gated_norm(
            heads,
            spec.num_key_heads,
            self.own.norm,
            self.epsilon,
            dtype,
            target,
            skip_width=self.channels,
        )
        rows = nn.Tensor.placeholder((out.shape[0], self.width), dtype)
        return op.tensor_ir_op(norm, "gated_norm", inputs, rows)


def _divides_a_group(part: Mamba2, options: BuildOptions) -> bool:
    """Whether workers divide the heads of a single group of B and C, which a norm spans."""
    assert part.spec.recurrent is not None
    return options.num_shards > 1 and part.spec.recurrent.num_key_heads == 1


def _for_workers(xbc: Sequence[Output], spec: RecurrentConfig) -> list[Output]:
    """Return the rows of x, B and C as workers divide them, who share a single group of B and C."""
    x, b, c = xbc
    is_whole = spec.num_key_heads == 1
    return [x, b._replace(is_whole=is_whole), c._replace(is_whole=is_whole)]
