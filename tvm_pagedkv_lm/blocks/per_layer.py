# SPDX-License-Identifier: Apache-2.0
"""Per-layer embeddings: a second table of embeddings, of which each layer adds a part.

`PerLayerEmbedding` makes the inputs of all layers and puts them behind the rows of a step.
`PerLayerInput` multiplies the part of a layer with a gate and adds it to the layer's output.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from tvm.relax.frontend import nn
from tvm.relax.frontend.nn import op

from ..config.decoder_config import DecoderConfig
from ..config.options import BuildOptions
from ..kernels.linear.packed import look_up, packed_matrix
from ..kernels.rows import row_kernels as kernels
from ..kernels.rows.stream_kernels import activated_product, ids_in_table, join_inputs, take_columns
from ..weights.weight_parts import Output, Part, Weight, columns, rows, vector
from .projections import Linear


class PerLayerEmbedding(nn.Module):
    """The inputs of all layers: an embedding, and a projection of the model's embedding."""

    def __init__(self, config: DecoderConfig, options: BuildOptions, name: str):
        assert config.per_layer_inputs is not None
        self.config, self.options, self.shape = config, options, config.per_layer_inputs
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
        out = nn.Tensor.placeholder((x.shape[0], config.row_width), options.dtype)
        inputs = [x, self.projection(x), embedded, self.norm]
        return op.tensor_ir_op(kernel, "join_inputs", inputs, out)

    def hidden(self, x: nn.Tensor) -> nn.Tensor:
        """Return the rows of the model without the inputs of the layers."""
        config, options = self.config, self.options
        width = config.hidden_size
        kernel = take_columns(config.row_width, 0, width, options.dtype, options.vector)
        out = nn.Tensor.placeholder((x.shape[0], width), options.dtype)
        return op.tensor_ir_op(kernel, "take_columns", [x], out)


class PerLayerInput(nn.Module):
    """``norm(projection(activation(gate(x)) * input)) (+ residual) (* scale)`` of a layer."""

    def __init__(self, config: DecoderConfig, options: BuildOptions, name: str, layer: int):
        assert config.per_layer_inputs is not None
        self.config, self.options = config, options
        self.width, hidden = config.per_layer_inputs.width, config.hidden_size
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
            config.activation, self.width, config.row_width, self.begin, options.dtype,
            options.vector,
        )  # fmt: skip
        gate = self.gate(x)
        added = self.projection(op.tensor_ir_op(kernel, "activated_product", [gate, inputs], gate))
        kernel = kernels.norm(
            config.hidden_size,
            config.norm_eps,
            options.dtype,
            options.vector,
            residual=residual is not None,
            scaled=scale is not None,
        )
        chosen = [each for each in (residual, scale) if each is not None]
        return op.tensor_ir_op(kernel, "norm", [added, self.norm, *chosen], x)


def per_layer_embedding_weights(config: DecoderConfig, ours: str) -> Iterator[tuple[str, Weight]]:
    """Yield the name and the source of every weight of a `PerLayerEmbedding`."""
    assert config.per_layer_inputs is not None
    shape, theirs = config.per_layer_inputs, config.names.model
    width = config.num_layers * shape.width
    table = Part(f"{theirs}.embed_tokens_per_layer.weight", (shape.vocab_size, width))
    yield f"{ours}.table", Weight((table,), True)
    projection = [Output("per_layer_model_projection", width, scale=config.hidden_size**-0.5)]
    yield from rows(f"{ours}.projection", theirs, projection, config.hidden_size)
    name = f"{theirs}.per_layer_projection_norm.weight"
    yield vector(f"{ours}.norm", name, shape.width, offset=config.norm_offset)


def per_layer_input_weights(
    config: DecoderConfig, ours: str, theirs: str
) -> Iterator[tuple[str, Weight]]:
    """Yield the name and the source of every weight of a `PerLayerInput`."""
    assert config.per_layer_inputs is not None
    width, hidden = config.per_layer_inputs.width, config.hidden_size
    yield from rows(f"{ours}.gate", theirs, [Output("per_layer_input_gate", width)], hidden)
    yield from columns(f"{ours}.projection", f"{theirs}.per_layer_projection", (hidden, width))
    name = f"{theirs}.post_per_layer_input_norm.weight"
    yield vector(f"{ours}.norm", name, hidden, offset=config.norm_offset)
