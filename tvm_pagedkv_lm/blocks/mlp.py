# SPDX-License-Identifier: Apache-2.0
"""`Mlp`: the dense MLP of a layer, and the sources of its weights."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

from tvm.relax.frontend import nn
from tvm.relax.frontend.nn import op

from ..config.decoder_config import DecoderConfig
from ..config.options import BuildOptions
from ..kernels.rows import row_kernels as kernels
from ..weights.weight_parts import Output, Weight, columns, rows, slices
from .projections import Linear, SplitLinear


class Mlp(nn.Module):
    """The MLP: ``activation(gate) * up`` between two projections."""

    def __init__(
        self,
        config: DecoderConfig,
        options: BuildOptions,
        name: str,
        width: int,
        deviations: float | None = None,
    ):
        """Build the MLP; `deviations` of the gate are as for `kernels.gated`."""
        self.width, self.options = width // options.num_shards, options
        self._gated = partial(kernels.gated, config.activation, deviations=deviations)
        if config.clamped_gate is not None:
            self._gated = partial(kernels.clamped_gated, *config.clamped_gate)
        hidden, bias = config.hidden_size, config.mlp_bias
        self.gate_up_proj = Linear(
            hidden, 2 * self.width, options, bias, name=f"{name}.gate_up_proj"
        )
        self.down_proj = SplitLinear(width, hidden, options, bias, name=f"{name}.down_proj")

    def forward(self, x: nn.Tensor, residual: nn.Tensor | None) -> nn.Tensor:
        options = self.options
        kernel = self._gated(self.width, options.dtype, options.vector)
        out = nn.Tensor.placeholder((x.shape[0], self.width), options.dtype)
        gated = op.tensor_ir_op(kernel, "gated", [self.gate_up_proj(x)], out)
        return self.down_proj(gated, residual)


def mlp_weights(
    config: DecoderConfig, ours: str, theirs: str, width: int
) -> Iterator[tuple[str, Weight]]:
    """Yield the name and the source of every weight of an MLP of this width."""
    names, scales, hidden = config.names, (config.scales.gate, 1.0), config.hidden_size
    if names.fused_gate_up:
        outputs = slices(names.fused_gate_up, width, width, scales=scales)
    else:
        both = zip((names.gate, names.up), scales, strict=True)
        outputs = [Output(name, width, scale=scale) for name, scale in both]
    yield from rows(f"{ours}.gate_up_proj", theirs, outputs, hidden, bias=config.mlp_bias)
    yield from columns(
        f"{ours}.down_proj",
        f"{theirs}.{names.down}",
        (hidden, width),
        bias=config.mlp_bias,
        scale=config.scales.mlp,
    )
