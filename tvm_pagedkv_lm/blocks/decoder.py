# SPDX-License-Identifier: Apache-2.0
"""`Decoder`: the functions of a compiled model, built from the blocks of all families."""

from __future__ import annotations

import ml_dtypes  # noqa: F401  registers bfloat16 with NumPy
import numpy as np
import tvm
from tvm.relax.frontend import nn
from tvm.relax.frontend.nn import op, spec

from tvm_pagedkv.relax import PagedKVCacheObject

from ..config.decoder_config import DecoderConfig
from ..config.options import BuildOptions
from ..kernels.linear.packed import look_up, packed_matrix
from ..kernels.rows import row_kernels
from ..weights.weight_parts import Part, Weight, Weights
from .altup import AltUp, Streams
from .decoder_layer import DecoderLayer, layer_weights
from .norm import Norm, norm_weight
from .per_layer import PerLayerEmbedding, PerLayerInputs
from .projections import Linear
from .step_rows import StepRows


class Decoder(nn.Module):
    """The functions of the compiled model. T is the number of rows of a step, for all sequences.

    - ``embed(ids int32 [T])`` -> x [T, row_width]
    - ``prefill(x, rows int32 [b], cache)`` -> logits float32 [b, vocab_size] of the chosen rows
    - ``decode(x, cache)`` -> logits float32 [T, vocab_size] of every row

    Of several pipeline stages, the first has `embed` and the last `prefill` and `decode`, over its
    own layers; the others have ``hidden(x, cache)`` -> x. The cache is one of
    `caches.Caches`.
    """

    def __init__(self, config: DecoderConfig, options: BuildOptions):
        self.config, self.options = config, options
        size, width = config.vocab_size, config.hidden_size
        self.vocabulary = packed_matrix("embed_tokens", size, width, options)
        own = options.layers_of(config)
        self.cache_indices = [config.cache_index(layer) for layer in own]
        self.layers = nn.ModuleList(
            [
                DecoderLayer(config, options, f"layers.{index}", layer)
                for index, layer in enumerate(own)
            ]
        )
        self.per_layer = self.streams = None
        inputs, altup = config.find(PerLayerInputs), config.find(AltUp)
        if inputs is not None:
            self.per_layer = PerLayerEmbedding(inputs, config, options, "per_layer")
        if altup is not None:
            self.streams = Streams(altup, config, options, "streams")
        if options.is_last:
            self.norm = Norm(config, options)
            self.lm_head = Linear(width, size, options, out_dtype="float32", name="lm_head")
        self.shares_head = config.tied_embeddings and options.is_last
        if options.is_first and not self.shares_head:
            self.embed_tokens = nn.Parameter(self.vocabulary.shape, self.vocabulary.dtype)

    def embed(self, ids: nn.Tensor) -> nn.Tensor:
        config, dtype = self.config, self.options.dtype
        scale = float(np.array(config.embedding_scale).astype(dtype))  # rounded, as in training
        weight = self.lm_head.weight if self.shares_head else self.embed_tokens
        x = look_up(self.vocabulary, ids, weight, dtype, scale)
        return x if self.per_layer is None else self.per_layer(ids, x)

    def hidden(self, x: nn.Tensor, cache: PagedKVCacheObject) -> nn.Tensor:
        return self._hidden(x, cache, is_decode=True)

    def _hidden(self, x: nn.Tensor, cache: PagedKVCacheObject, is_decode: bool) -> nn.Tensor:
        step = StepRows(inputs=x, is_decode=is_decode)
        if self.per_layer is not None:
            x = self.per_layer.hidden(x)
        if self.streams is not None:
            x = self.streams.stack(x)
        for index, layer in zip(self.cache_indices, self.layers, strict=True):
            x = layer(x, cache, index, step)
        return x

    def prefill(self, x: nn.Tensor, rows: nn.Tensor, cache: PagedKVCacheObject) -> nn.Tensor:
        options, width = self.options, stream_width(self.config)
        kernel = row_kernels.take_rows(width, options.dtype, options.vector)
        hidden = self._hidden(x, cache, is_decode=False)
        out = nn.Tensor.placeholder((rows.shape[0], width), options.dtype)
        last = op.tensor_ir_op(kernel, "take_rows", [hidden, rows], out)
        return self._logits(last)

    def decode(self, x: nn.Tensor, cache: PagedKVCacheObject) -> nn.Tensor:
        return self._logits(self.hidden(x, cache))

    def _logits(self, x: nn.Tensor) -> nn.Tensor:
        if self.streams is not None:
            x = self.streams.merge(x)
        logits, cap = self.lm_head(self.norm(x)), self.config.logit_softcap
        if cap is None:
            return logits
        kernel = row_kernels.soft_cap_logits(self.config.vocab_size, cap, self.options.vector)
        out = nn.Tensor.placeholder(logits.shape, "float32")
        return op.tensor_ir_op(kernel, "soft_cap", [logits], out)


def row_width(config: DecoderConfig) -> int:
    """Return the width of the rows that layers take: hidden features, and inputs of each layer."""
    inputs = config.find(PerLayerInputs)
    return config.hidden_size + (0 if inputs is None else inputs.all_widths(config))


def stream_width(config: DecoderConfig) -> int:
    """Return the width of the rows between layers, which have all streams."""
    altup = config.find(AltUp)
    return config.hidden_size * (1 if altup is None else altup.num_streams)


def weights(config: DecoderConfig, layers: range) -> Weights:
    """Yield the name and the source of every weight of these layers of a `Decoder`."""
    names, size = config.names, (config.vocab_size, config.hidden_size)
    embedding = Weight((Part(f"{names.model}.{names.embedding}.weight", size),), True)
    yield "embed_tokens", embedding
    yield (
        "lm_head.weight",
        embedding
        if config.tied_embeddings
        else Weight((Part(f"{names.lm_head}.weight", size),), True),
    )
    inputs, altup = config.find(PerLayerInputs), config.find(AltUp)
    if inputs is not None:
        yield from inputs.embedding_weights(config, "per_layer", names.model)
    if altup is not None:
        yield from altup.stream_weights(config, "streams", names.model)
    for index, layer in enumerate(layers):
        theirs = f"{names.model}.layers.{layer}"
        yield from layer_weights(config, config.layers[layer], f"layers.{index}", theirs)
    final = f"{names.model}.{names.final_norm}"
    yield norm_weight(config, "norm.weight", final, scale=config.logit_scale)


def build_module(config: DecoderConfig, options: BuildOptions) -> tvm.IRModule:
    """Return the model as an IRModule whose functions take the weights as one packed argument."""
    packed = {"param_mode": "packed", "effect_mode": "none"}
    x = spec.Tensor(["n", row_width(config)], options.dtype)
    cache = spec.Object(object_type=PagedKVCacheObject)
    functions = {}
    if options.is_first:
        functions["embed"] = {"ids": spec.Tensor(["n"], "int32"), "$": packed}
    if options.is_last:
        rows = spec.Tensor(["b"], "int32")
        functions["prefill"] = {"x": x, "rows": rows, "cache": cache, "$": packed}
        functions["decode"] = {"x": x, "cache": cache, "$": packed}
    else:
        functions["hidden"] = {"x": x, "cache": cache, "$": packed}
    module, _, _ = Decoder(config, options).export_tvm(functions, allow_extern=True)
    return module
