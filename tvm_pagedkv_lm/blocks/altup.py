# SPDX-License-Identifier: Apache-2.0
"""Alternating updates (AltUp) and learned residuals (LAuReL), as in Gemma 3n.

A model has several residual streams. A layer predicts all of them, computes the active one, and
corrects the others by a share of what it changed.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from tvm.relax.frontend import nn
from tvm.relax.frontend.nn import op

from ..config.decoder_config import DecoderConfig
from ..config.options import BuildOptions
from ..config.part import LayerPart
from ..kernels.rows import norms
from ..kernels.rows.row_kernels import scaled_sum, take_columns
from ..kernels.rows.stream_kernels import (
    add_to_streams,
    correct_streams,
    merge_streams,
    predict_streams,
    stack_streams,
)
from ..weights.weight_parts import Output, Part, Weight, Weights, columns, rows, vector
from .projections import Linear


@dataclass(frozen=True)
class AltUp(LayerPart):
    """Alternating updates: several residual streams, of which each layer computes one.

    A layer predicts all streams from those before it, computes the active one, and corrects the
    others by what it changed. It also has a low-rank product beside attention (LAuReL).

    Parameters
    ----------
    num_streams : int
    active : int
        The stream that layers compute.
    laurel_rank : int
        Width of the low-rank product.
    scales_output : bool
        Whether the active stream is multiplied by a weight for each feature before it is multiplied
        with the per-layer inputs.
    """

    num_streams: int
    active: int
    laurel_rank: int
    scales_output: bool = True

    is_connected = True

    def build(
        self, config: DecoderConfig, options: BuildOptions, name: str, layer: int
    ) -> AltUpLayer:
        return AltUpLayer(self, config, options, f"{name}.altup")

    def build_laurel(self, config: DecoderConfig, options: BuildOptions, name: str) -> Laurel:
        """Return the module of the low-rank product."""
        return Laurel(self, config, options, f"{name}.laurel")

    def weights(self, config: DecoderConfig, ours: str, theirs: str) -> Weights:
        width, offset = config.hidden_size, config.norm_offset
        count, scale = self.num_streams, 1 / width
        altup, laurel = f"{theirs}.altup", f"{theirs}.laurel"
        yield vector(
            f"{ours}.altup.router_norm", f"{altup}.router_norm.weight", width,
            scale=scale, offset=offset * scale,
        )  # fmt: skip
        router = [Output("modality_router", count)]
        yield from rows(f"{ours}.altup.router", altup, router, width, is_split=False)
        coefficients = {"prediction": (count**2, count), "correction": (count, count)}
        for name, matrix in coefficients.items():
            yield vector(f"{ours}.altup.{name}", f"{altup}.{name}_coefs.weight", *matrix)
        if self.scales_output:
            yield vector(f"{ours}.altup.scale", f"{altup}.correct_output_scale", width)
        left = [Output("linear_left", self.laurel_rank)]
        yield from rows(f"{ours}.laurel.left", laurel, left, width)
        right = f"{ours}.laurel.right", f"{laurel}.linear_right"
        yield from columns(*right, (width, self.laurel_rank))
        name = f"{laurel}.post_laurel_norm.weight"
        yield vector(f"{ours}.laurel.norm", name, width, offset=offset)

    def stream_weights(self, config: DecoderConfig, ours: str, theirs: str) -> Weights:
        """Yield the name and the source of every weight of `Streams`."""
        width = config.hidden_size
        others = range(self.num_streams - 1)
        parts = tuple(
            Part(f"{theirs}.altup_projections.{i}.weight", (width, width)) for i in others
        )
        yield f"{ours}.project.weight", Weight(parts, True)
        for i in others:
            part = Part(f"{theirs}.altup_unembed_projections.{i}.weight", (width, width))
            yield f"{ours}.unproject.{i}.weight", Weight((part,), True)


class Streams(nn.Module):
    """Makes the streams of a model from its embedding, and one row out of them at the end."""

    def __init__(self, shape: AltUp, config: DecoderConfig, options: BuildOptions, name: str):
        self.config, self.options, width = config, options, config.hidden_size
        self.count = shape.num_streams
        self.project = Linear(width, (self.count - 1) * width, options, name=f"{name}.project")
        self.unproject = nn.ModuleList(
            [
                Linear(width, width, options, name=f"{name}.unproject.{i}")
                for i in range(self.count - 1)
            ]
        )

    def stack(self, x: nn.Tensor) -> nn.Tensor:
        """Return the streams ``[n, num_streams * hidden_size]`` of embeddings."""
        width, options = self.config.hidden_size, self.options
        kernel = stack_streams(self.count, width, options.dtype, options.vector)
        out = nn.Tensor.placeholder((x.shape[0], self.count * width), options.dtype)
        return op.tensor_ir_op(kernel, "stack_streams", [x, self.project(x)], out)

    def merge(self, x: nn.Tensor) -> nn.Tensor:
        """Return rows ``[n, hidden_size]`` of streams."""
        width, options = self.config.hidden_size, self.options
        projected = [
            linear(_columns(x, (1 + i) * width, width, options))
            for i, linear in enumerate(self.unproject)
        ]
        kernel = merge_streams(self.count, width, options.dtype, options.vector)
        out = nn.Tensor.placeholder((x.shape[0], width), options.dtype)
        return op.tensor_ir_op(kernel, "merge_streams", [x, *projected], out)


class AltUpLayer(nn.Module):
    """What AltUp adds to a layer: a prediction before it, and corrections behind it."""

    def __init__(self, shape: AltUp, config: DecoderConfig, options: BuildOptions, name: str):
        self.config, self.options, self.shape = config, options, shape
        count, width = self.shape.num_streams, config.hidden_size
        self.router_norm = nn.Parameter((width,), "float32")
        self.router = Linear(width, count, options, out_dtype="float32", name=f"{name}.router")
        self.prediction = nn.Parameter((count**2, count), "float32")
        self.correction = nn.Parameter((count, count), "float32")
        self.scale = nn.Parameter((width,), "float32") if self.shape.scales_output else None

    def predict(self, x: nn.Tensor) -> nn.Tensor:
        """Return the streams that are expected behind the layer."""
        shape, options = self.shape, self.options
        width = self.config.hidden_size
        kernel = predict_streams(shape.num_streams, width, options.dtype, options.vector)
        inputs = [x, self._route(self.active(x)), self.prediction]
        return op.tensor_ir_op(kernel, "predict_streams", inputs, x)

    def active(self, x: nn.Tensor, scale: nn.Tensor | None = None) -> nn.Tensor:
        """Return the stream that the layer computes, times `scale`."""
        width = self.config.hidden_size
        return _columns(x, self.shape.active * width, width, self.options, scale)

    def correct(self, predicted: nn.Tensor, computed: nn.Tensor) -> nn.Tensor:
        """Return the streams behind the layer."""
        shape, options, width = self.shape, self.options, self.config.hidden_size
        kernel = correct_streams(
            shape.num_streams, shape.active, width, options.dtype, options.vector
        )
        inputs = [predicted, computed, self._route(computed), self.correction]
        return op.tensor_ir_op(kernel, "correct_streams", inputs, predicted)

    def add(self, x: nn.Tensor, added: nn.Tensor) -> nn.Tensor:
        """Return streams, of which all but the first get rows added."""
        options = self.options
        kernel = add_to_streams(
            self.shape.num_streams, self.config.hidden_size, options.dtype, options.vector
        )
        return op.tensor_ir_op(kernel, "add_to_streams", [x, added], x)

    def _route(self, x: nn.Tensor) -> nn.Tensor:
        config, options = self.config, self.options
        kernel = norms.norm(config.hidden_size, config.norm_eps, options.dtype, options.vector)
        return self.router(op.tensor_ir_op(kernel, "norm", [x, self.router_norm], x))


class Laurel(nn.Module):
    """``(x + y + norm(right(left(y)))) / sqrt(2)`` of the rows x behind attention and y before."""

    def __init__(self, shape: AltUp, config: DecoderConfig, options: BuildOptions, name: str):
        self.config, self.options = config, options
        width, rank = config.hidden_size, shape.laurel_rank
        self.left = Linear(width, rank, options, name=f"{name}.left")
        self.right = Linear(rank, width, options, name=f"{name}.right")
        self.norm = nn.Parameter((width,), "float32")

    def forward(self, x: nn.Tensor, y: nn.Tensor) -> nn.Tensor:
        config, options = self.config, self.options
        width = config.hidden_size
        kernel = norms.norm(width, config.norm_eps, options.dtype, options.vector, residual=True)
        low_rank = self.right(self.left(y))
        learned = op.tensor_ir_op(kernel, "norm", [low_rank, self.norm, y], y)
        kernel = scaled_sum(width, math.sqrt(0.5), options.dtype, options.vector)
        return op.tensor_ir_op(kernel, "scaled_sum", [x, learned], x)


def _columns(
    x: nn.Tensor, begin: int, width: int, options: BuildOptions, scale: nn.Tensor | None = None
) -> nn.Tensor:
    kernel = take_columns(
        int(x.shape[1]), begin, width, options.dtype, options.vector, scaled=scale is not None
    )
    out = nn.Tensor.placeholder((x.shape[0], width), options.dtype)
    weights = [] if scale is None else [scale]
    return op.tensor_ir_op(kernel, "take_columns", [x, *weights], out)
