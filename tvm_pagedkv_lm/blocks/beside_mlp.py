# SPDX-License-Identifier: Apache-2.0
"""`ExpertsBesideMlp`: experts whose output is added to that of a dense MLP, as in Gemma 4."""

from __future__ import annotations

from dataclasses import dataclass

from tvm.relax.frontend import nn
from tvm.relax.frontend.nn import op

from ..config.decoder_config import DecoderConfig
from ..config.expert_config import Experts
from ..config.options import BuildOptions
from ..config.part import LayerPart
from ..kernels.rows import norms
from ..weights.weight_parts import Weights, vector
from .moe import MixtureOfExperts

# Our names of the norms, and those in checkpoints.
_NORMS = {
    "after_mlp": "post_feedforward_layernorm_1",
    "before": "pre_feedforward_layernorm_2",
    "after": "post_feedforward_layernorm_2",
}


@dataclass(frozen=True)
class ExpertsBesideMlp(LayerPart):
    """``after_mlp(dense) + after(experts(before(x)))``, routed by a norm of x of its own.

    Parameters
    ----------
    experts : MixtureOfExperts
    """

    experts: MixtureOfExperts

    @property
    def routed(self) -> Experts:
        return self.experts.experts

    def build(
        self, config: DecoderConfig, options: BuildOptions, name: str, layer: int
    ) -> ExpertsBesideMlpBlock:
        return ExpertsBesideMlpBlock(self, config, options, name, layer)

    def weights(self, config: DecoderConfig, ours: str, theirs: str) -> Weights:
        yield from self.experts.weights(config, f"{ours}.experts", theirs)
        width = config.hidden_size
        yield vector(f"{ours}.router_norm", f"{theirs}.router.scale", width, scale=width**-0.5)
        for name, tensor in _NORMS.items():
            yield vector(f"{ours}.{name}", f"{theirs}.{tensor}.weight", width)


class ExpertsBesideMlpBlock(nn.Module):
    """The experts, and the norms around them and of the MLP."""

    def __init__(
        self,
        part: ExpertsBesideMlp,
        config: DecoderConfig,
        options: BuildOptions,
        name: str,
        layer: int,
    ):
        self.config, self.options, width = config, options, config.hidden_size
        self.experts = part.experts.build(config, options, f"{name}.experts", layer)
        self.router_norm, self.after_mlp, self.before, self.after = (
            nn.Parameter((width,), "float32") for _ in range(4)
        )

    def forward(self, x: nn.Tensor, dense: nn.Tensor) -> nn.Tensor:
        """Return the sum for the rows x before the MLP and `dense` behind it."""
        rows = self._norm(x, self.before)
        routed = self.experts(rows, None, self._norm(x, self.router_norm))
        return self._norm(routed, self.after, self._norm(dense, self.after_mlp))

    def _norm(
        self, x: nn.Tensor, weight: nn.Tensor, residual: nn.Tensor | None = None
    ) -> nn.Tensor:
        config, options = self.config, self.options
        kernel = norms.norm(
            config.hidden_size, config.norm_eps, options.dtype, options.vector,
            residual=residual is not None,
        )  # fmt: skip
        added = [] if residual is None else [residual]
        return op.tensor_ir_op(kernel, "norm", [x, weight, *added], x)
