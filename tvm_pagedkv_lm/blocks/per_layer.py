# SPDX-License-Identifier: Apache-2.0
"""Per-layer embeddings: a second table of embeddings, of which each layer adds a part.

`PerLayerEmbedding` makes the inputs of all layers and puts them behind the rows of a step.
`PerLayerInputBlock` multiplies the part of a layer with a gate and adds it to the layer's output.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from tvm.relax.frontend import nn
from tvm.relax.frontend.nn import op

from ..config.decoder_config import DecoderConfig
from ..config.options import BuildOptions
from ..config.part import LayerPart
from ..kernels.linear.packed import look_up, packed_matrix
from ..kernels.rows import norms
from ..kernels.rows.per_layer_kernels import activated_product, ids_in_table, join_inputs
from ..kernels.rows.row_kernels import take_columns
from ..weights.weight_parts import Output, Part, Weight, Weights, columns, rows
from .norm import norm_weight
from .projections import Linear


@dataclass(frozen=True)
class PerLayerInputs(LayerPart):
    """Per-layer embeddings (PLE), of which all layers of a model have a part.

    Parameters
    ----------
    width : int
        Number of features that a layer gets.
    vocab_size : int
        Rows of the table. Tokens beyond it get row 0.
    activation : str
        That of the gate, as for `Mlp`.
    """

    width: int
    vocab_size: int
    activation: str

    is_connected = True

    def all_widths(self, config: DecoderConfig) -> int:
        """Return the number of features that all layers get."""
        return config.num_layers * self.width

    def build(
        self, config: DecoderConfig, options: BuildOptions, name: str, layer: int
    ) -> PerLayerInputBlock:
        return PerLayerInputBlock(self, config, options, name, layer)

    def weights(self, config: DecoderConfig, ours: str, theirs: str) -> Weights:
        width, hidden = self.width, config.hidden_size
        yield from rows(f"{ours}.gate", theirs, [Output("per_layer_input_gate", width)], hidden)
        yield from columns(f"{ours}.projection", f"{theirs}.per_layer_projection", (hidden, width))
        yield norm_weight(config, f"{ours}.norm", f"{theirs}.post_per_layer_input_norm")

    def embedding_weights(self, config: DecoderConfig, ours: str, theirs: str) -> Weights:
        """Yield the name and the source of every weight of a `PerLayerEmbedding`."""
        width, hidden = self.all_widths(config), config.hidden_size
        table = Part(f"{theirs}.embed_tokens_per_layer.weight", (self.vocab_size, width))
        yield f"{ours}.table", Weight((table,), True)
        projection = [Output("per_layer_model_projection", width, scale=hidden**-0.5)]
        yield from rows(f"{ours}.projection", theirs, projection, hidden)
        name = f"{theirs}.per_layer_projection_norm"
        yield norm_weight(config, f"{ours}.norm", name, self.width)


class PerLayerEmbedding(nn.Module):
    """The inputs of all layers: an embedding, and a projection of the model's embedding."""

    def __init__(
        self, shape: PerLayerInputs, config: DecoderConfig, options: BuildOptions, name: str
    ):
        self.config, self.options, self.shape = config, options, shape
        self.row_width = config.hidden_size + shape.all_widths(config)
        width = config.num_layers * self.shape.width
        self.embedding = packed_matrix(f"{name}.table", self.shape.vocab_size, width, options)
        self.table = nn.Parameter(self.embedding.shape, self.embedding.dtype)
        self.projection = Linear(config.hidden_size, width, options, name=f"{name}.projection")
        self.norm = nn.Parameter((self.shape.width,), "float32")

    def forward(self, ids: nn.Tensor, x: nn.Tensor) -> nn.Tensor:
        """Return rows ``[n, row_width]``: x, and the inputs of each layer."""
        config, options, shape = self.config, self.options, self.shape
        if shape.vocab_size < config.vocab_size:
            kernel = ids_in_table(shape.vocab_size, options.vector)
            ids = op.tensor_ir_op(kernel, "ids_in_table", [ids], ids)
        scale = float(np.array(shape.width**0.5).astype(options.dtype))  # rounded, as in training
        embedded = look_up(self.embedding, ids, self.table, options.dtype, scale)
        kernel = join_inputs(
            config.hidden_size, config.num_layers, shape.width, config.norm_eps, options.dtype,
            options.vector,
        )  # fmt: skip
        out = nn.Tensor.placeholder((x.shape[0], self.row_width), options.dtype)
        inputs = [x, self.projection(x), embedded, self.norm]
        return op.tensor_ir_op(kernel, "join_inputs", inputs, out)

    def hidden(self, x: nn.Tensor) -> nn.Tensor:
        """Return the rows of the model without the inputs of the layers."""
        config, options = self.config, self.options
        width = config.hidden_size
        kernel = take_columns(self.row_width, 0, width, options.dtype, options.vector)
        out = nn.Tensor.placeholder((x.shape[0], width), options.dtype)
        return op.tensor_ir_op(kernel, "take_columns", [x], out)


class PerLayerInputBlock(nn.Module):
    """``norm(projection(activation(gate(x)) * input)) (+ residual) (* scale)`` of a layer."""

    def __init__(
        self,
        shape: PerLayerInputs,
        config: DecoderConfig,
        options: BuildOptions,
        name: str,
        layer: int,
    ):
        self.config, self.options, self.activation = config, options, shape.activation
        self.width, hidden = shape.width, config.hidden_size
        self.row_width = hidden + shape.all_widths(config)
        self.begin = hidden + layer * self.width
        self.gate = Linear(hidden, self.width, options, name=f"{name}.gate")
        self.projection = Linear(self.width, hidden, options, name=f"{name}.projection")
        self.norm = nn.Parameter((hidden,), "float32")

    def forward(
        self,
        x: nn.Tensor,
        inputs: nn.Tensor,
        residual: nn.Tensor | None,
        scale: nn.Tensor | None,
    ) -> nn.Tensor:
        config, options = self.config, self.options
        kernel = activated_product(
            self.activation, self.width, self.row_width, self.begin, options.dtype, options.vector
        )
        gate = self.gate(x)
        added = self.projection(op.tensor_ir_op(kernel, "activated_product", [gate, inputs], gate))
        kernel = norms.norm(
            config.hidden_size,
            config.norm_eps,
            options.dtype,
            options.vector,
            residual=residual is not None,
            scaled=scale is not None,
        )
        chosen = [each for each in (residual, scale) if each is not None]
        return op.tensor_ir_op(kernel, "norm", [added, self.norm, *chosen], x)
