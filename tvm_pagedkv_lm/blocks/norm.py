# SPDX-License-Identifier: Apache-2.0
"""`Norm`: the norms of layers and of a model, and the source of their weights."""

from __future__ import annotations

from tvm.relax.frontend import nn
from tvm.relax.frontend.nn import op

from ..config.decoder_config import DecoderConfig
from ..config.options import BuildOptions
from ..kernels.rows import norms
from ..weights.weight_parts import Weight, vector


class Norm(nn.Module):
    """Norm of the rows of x ``[n, features]``, plus a residual if one is given."""

    def __init__(self, config: DecoderConfig, options: BuildOptions):
        self.features, self.epsilon = config.hidden_size, config.norm_eps
        self.options, self.subtracts_mean = options, config.norm_subtracts_mean
        self.weight = nn.Parameter((self.features,), "float32")

    def forward(
        self, x: nn.Tensor, residual: nn.Tensor | None = None, scale: nn.Tensor | None = None
    ) -> nn.Tensor:
        """Return the norm plus the residual, times a scale float32 [1]."""
        kernel = norms.norm(
            self.features,
            self.epsilon,
            self.options.dtype,
            self.options.vector,
            residual=residual is not None,
            scaled=scale is not None,
            subtracts_mean=self.subtracts_mean,
        )
        inputs = [x, self.weight, *(each for each in (residual, scale) if each is not None)]
        out = nn.Tensor.placeholder(x.shape, self.options.dtype)
        return op.tensor_ir_op(kernel, "norm", inputs, out)


def norm_weight(
    config: DecoderConfig, ours: str, theirs: str, width: int = 0, scale: float = 1.0
) -> tuple[str, Weight]:
    """Return the name and the source of the weights of a norm, of all features by default."""
    offset = config.norm_offset * scale
    return vector(ours, f"{theirs}.weight", width or config.hidden_size, scale=scale, offset=offset)
