# SPDX-License-Identifier: Apache-2.0
"""`Mlp`: the dense MLP of a layer."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

from tvm.relax.frontend import nn
from tvm.relax.frontend.nn import op

from ..config.decoder_config import DecoderConfig
from ..config.options import BuildOptions
from ..config.part import LayerPart
from ..kernels.rows import gates
from ..weights.weight_parts import Output, Weights, columns, rows, slices
from .projections import Linear, SplitLinear


@dataclass(frozen=True)
class MlpNames:
    """Names of the tensors of an MLP in checkpoints.

    Parameters
    ----------
    block : str
        The part of a layer that has the others.
    gate, up, down : str
    fused_gate_up : str, optional
        One tensor for gate and up. None: they have tensors of their own.
    """

    block: str = "mlp"
    gate: str = "gate_proj"
    up: str = "up_proj"
    down: str = "down_proj"
    fused_gate_up: str | None = None


@dataclass(frozen=True)
class Mlp(LayerPart):
    """``activation(gate) * up`` between two projections.

    Parameters
    ----------
    width : int
    activation : {"silu", "gelu_tanh"}
        Activation of the gate.
    bias : bool
        Whether the projections have biases.
    clamped_gate : (float, float), optional
        Factor and limit of the gate of GPT-OSS, in place of ``activation(gate) * up``; see
        `gates.clamped_gated`.
    deviations : float, optional
        Only what exceeds the mean of the gate by so many standard deviations is kept.
    gate_scale, output_scale : float
        Factors on the gate, before its activation, and on the output, by which weights are
        multiplied on loading.
    names : MlpNames
    """

    width: int
    activation: str = "silu"
    bias: bool = False
    clamped_gate: tuple[float, float] | None = None
    deviations: float | None = None
    gate_scale: float = 1.0
    output_scale: float = 1.0
    names: MlpNames = MlpNames()

    @property
    def gated(self) -> partial[Any]:
        """The function that makes the kernel of the gate."""
        if self.clamped_gate is not None:
            return partial(gates.clamped_gated, *self.clamped_gate)
        return partial(gates.gated, self.activation, deviations=self.deviations)

    @property
    def shared_counts(self) -> dict[str, int]:
        return {"intermediate_size": self.width}

    def build(
        self, config: DecoderConfig, options: BuildOptions, name: str, layer: int
    ) -> MlpBlock:
        return MlpBlock(self, config, options, name)

    def weights(self, config: DecoderConfig, ours: str, theirs: str) -> Weights:
        yield from self.weights_in(config, ours, f"{theirs}.{self.names.block}")

    def weights_in(self, config: DecoderConfig, ours: str, theirs: str) -> Weights:
        """Yield the weights of an MLP whose tensors are in the part `theirs` of a layer."""
        names, width, hidden = self.names, self.width, config.hidden_size
        scales = self.gate_scale, 1.0
        if names.fused_gate_up:
            outputs = slices(names.fused_gate_up, width, width, scales=scales)
        else:
            both = zip((names.gate, names.up), scales, strict=True)
            outputs = [Output(name, width, scale=scale) for name, scale in both]
        yield from rows(f"{ours}.gate_up_proj", theirs, outputs, hidden, bias=self.bias)
        yield from columns(
            f"{ours}.down_proj",
            f"{theirs}.{names.down}",
            (hidden, width),
            bias=self.bias,
            scale=self.output_scale,
        )


class MlpBlock(nn.Module):
    """The gate between the two projections of an MLP."""

    def __init__(self, part: Mlp, config: DecoderConfig, options: BuildOptions, name: str):
        self.width, self.options = part.width // options.num_shards, options
        self._gated, hidden, bias = part.gated, config.hidden_size, part.bias
        self.gate_up_proj = Linear(
            hidden, 2 * self.width, options, bias, name=f"{name}.gate_up_proj"
        )
        self.down_proj = SplitLinear(part.width, hidden, options, bias, name=f"{name}.down_proj")

    def forward(self, x: nn.Tensor, residual: nn.Tensor | None) -> nn.Tensor:
        options = self.options
        kernel = self._gated(self.width, options.dtype, options.vector)
        out = nn.Tensor.placeholder((x.shape[0], self.width), options.dtype)
        gated = op.tensor_ir_op(kernel, "gated", [self.gate_up_proj(x)], out)
        return self.down_proj(gated, residual)
