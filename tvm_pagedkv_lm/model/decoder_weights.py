# SPDX-License-Identifier: Apache-2.0
"""The sources of a decoder's weights: tensors of a checkpoint, by name and shape."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
import tvm

from tir_kernels.spec import ITEMSIZE
from tvm_pagedkv.config import KV_KINDS
from tvm_pagedkv.measure import HUGE_PAGE_BYTES, huge_zeros

from ..blocks.altup import altup_weights, stream_weights
from ..blocks.beside_mlp import beside_mlp_weights
from ..blocks.block_indexer import block_indexer_weights
from ..blocks.blocks import KEPT_BESIDE
from ..blocks.decoder import Decoder
from ..blocks.latent import latent_weights
from ..blocks.latent_choice import sparse_latent_weights
from ..blocks.mixers import mixer_of
from ..blocks.mlp import mlp_weights
from ..blocks.moe import moe_weights
from ..blocks.per_layer import per_layer_embedding_weights, per_layer_input_weights
from ..blocks.shared_kv import shared_attention_weights
from ..config.decoder_config import DecoderConfig
from ..config.options import BuildOptions
from ..formats.weight_formats import QuantizedRows, WeightFormat, concatenate, quantize
from ..kernels.linear.packed import packed_matrix
from ..weights.static_scales import is_scale
from ..weights.tensors import Tensors
from ..weights.weight_parts import Output, Part, Weight, columns, halves, rows, slices, vector
from .progress import report


def weights(config: DecoderConfig, layers: range) -> Iterator[tuple[str, Weight]]:
    """Yield the name and the source of every weight of these layers of the model."""
    names, size = config.names, (config.vocab_size, config.hidden_size)
    embedding = Weight((Part(f"{names.model}.{names.embedding}.weight", size),), True)
    yield "embed_tokens", embedding
    yield (
        "lm_head.weight",
        embedding
        if config.tied_embeddings
        else Weight((Part(f"{names.lm_head}.weight", size),), True),
    )
    if config.per_layer_inputs is not None:
        yield from per_layer_embedding_weights(config, "per_layer")
    if config.altup is not None:
        yield from stream_weights(config, "streams")
    for index, layer in enumerate(layers):
        yield from _layer(config, f"layers.{index}", layer)
    final = f"{names.model}.{names.final_norm}"
    yield _norm(config, "norm.weight", final, scale=config.scales.logits)


def _layer(config: DecoderConfig, ours: str, index: int) -> Iterator[tuple[str, Weight]]:
    names, theirs = config.names, f"{config.names.model}.layers.{index}"
    attention, source = f"{theirs}.{names.attention}", config.source_of(index)
    for spec in config.layers_of(index):
        if source is not None:
            yield from shared_attention_weights(config, f"{ours}.self_attn", attention, source)
        elif spec.kind == "mla" and config.indexer is None:
            yield from latent_weights(config, f"{ours}.self_attn", attention)
        elif spec.kind == "mla":
            assert config.indexer is not None
            chooses = index in config.indexer.layers
            both = f"{ours}.self_attn", attention
            yield from sparse_latent_weights(config, *both, chooses=chooses)
        elif spec.kind in KEPT_BESIDE:
            continue
        elif spec.kind in KV_KINDS:
            yield from _attention(config, f"{ours}.self_attn", attention, index)
        else:
            mixer = mixer_of(spec)
            yield from mixer.weights(config, spec, f"{ours}.mixer", f"{theirs}.{names.mixer}")
    if config.has_experts(index):
        assert config.experts is not None
        block = f"{theirs}.{config.experts.names.block}"
        yield from moe_weights(config, f"{ours}.mlp", block)
    elif config.intermediate_size:
        mlp = f"{theirs}.{names.mlp}"
        yield from mlp_weights(config, f"{ours}.mlp", mlp, config.width_of(index))
    if config.has_experts_beside_mlp:
        yield from beside_mlp_weights(config, f"{ours}.beside_mlp", theirs)
    if config.altup is not None:
        yield from altup_weights(config, ours, theirs)
    if config.per_layer_inputs is not None:
        yield from per_layer_input_weights(config, f"{ours}.inputs", theirs)
    if config.layer_scale:
        yield vector(f"{ours}.scale", f"{theirs}.layer_scalar", 1)
    for place, name in vars(config.norms).items():
        if name:
            yield _norm(config, f"{ours}.{place}.weight", f"{theirs}.{name}")


def _norm(
    config: DecoderConfig, ours: str, theirs: str, width: int = 0, scale: float = 1.0
) -> tuple[str, Weight]:
    part = Part(f"{theirs}.weight", (width or config.hidden_size,), scale=scale)
    return ours, Weight((part,), False, offset=config.norm_offset * scale)


def _attention(
    c: DecoderConfig, ours: str, theirs: str, layer: int
) -> Iterator[tuple[str, Weight]]:
    head_dim = c.head_dim_of(layer)
    q_width, kv_width = c.num_heads * head_dim, c.kv_heads_of(layer) * head_dim
    names, outputs_of = c.names, (q_width, kv_width, kv_width)
    if names.fused_qkv:
        outputs = slices(names.fused_qkv, *outputs_of, scales=c.scales.qkv)
    else:
        projections = zip(("q_proj", "k_proj", "v_proj"), outputs_of, c.scales.qkv, strict=True)
        outputs = [Output(name, width, scale=scale) for name, width, scale in projections]
    if layer in c.v_of_k:
        del outputs[-1]
    if c.attention_gate:
        outputs[0], gate = halves("q_proj", c.num_heads, head_dim)
        yield from rows(f"{ours}.gate", theirs, [gate], c.hidden_size, bias=c.qkv_bias)
    if c.interleaved_rope:
        outputs[:2] = [each._replace(paired=head_dim) for each in outputs[:2]]
    yield from rows(f"{ours}.qkv_proj", theirs, outputs, c.hidden_size, bias=c.qkv_bias)
    yield from columns(
        f"{ours}.o_proj",
        f"{theirs}.{names.attention_output}",
        (c.hidden_size, q_width),
        bias=c.o_bias,
        scale=c.scales.attention,
    )
    if c.indexer is not None and layer in c.indexer.layers:
        yield from block_indexer_weights(c, f"{ours}.indexer", theirs)
    if c.sink_logits:
        sinks = Part(f"{theirs}.{names.sinks}", (c.num_heads,))
        yield f"{ours}.sinks", Weight((sinks,), False, "rows")
    if c.qk_norm in ("head", "projection"):
        widths = (head_dim, head_dim) if c.qk_norm == "head" else (q_width, kv_width)
        for name, tensor, width in zip("qk", (names.q_norm, names.k_norm), widths, strict=True):
            yield _norm(c, f"{ours}.qk_norm.{name}_weight", f"{theirs}.{tensor}", width)


_LOOKED_UP = ("embed_tokens", "per_layer.table")  # rows of these are not multiplied


def matrix_bytes(
    config: DecoderConfig, stages: Iterable[BuildOptions], *, only_experts: bool = False
) -> int:
    """Return the bytes of the matrices that multiply rows, of all stages and workers of a model."""
    total = 0
    for options in stages:
        for name, weight in weights(config, options.layers_of(config)):
            is_used = options.is_last if name == "lm_head.weight" else name not in _LOOKED_UP
            if weight.is_matrix and is_used and (weight.experts > 1 or not only_experts):
                size = sum(part.size for part in weight.parts)
                format = options.format_of(name)
                itemsize = ITEMSIZE[options.dtype]
                total += size * itemsize if format is None else format.num_bytes(size)
    return total


# --- loading ------------------------------------------------------------------------------------


def load_parameters(
    config: DecoderConfig, options: BuildOptions, checkpoint: Tensors, shard: int = 0
) -> list[tvm.runtime.Tensor]:
    """Load the weights of a worker, in the order of the compiled functions.

    Tensors are read one at a time, to save memory.

    Raises
    ------
    ValueError
        If a tensor is missing, has another shape or is not of a floating-point type, or if a
        tensor of the text model has no use; the message names it.
    """
    refuse_unread(config, checkpoint)
    sources = dict(weights(config, options.layers_of(config)))
    loaded = []
    parameters = [*Decoder(config, options).named_parameters()]
    for index, (name, parameter) in enumerate(parameters):
        report("loading weights", index, len(parameters))
        source, dtype = sources[name], parameter.dtype
        if source.stack == 1:
            array = _load(name, source, checkpoint, options, shard, dtype)
            loaded.append(_as_parameter(array.reshape(parameter.shape)))
            continue
        memory, tensor = huge_zeros(parameter.shape, dtype)
        stack = memory.reshape(source.stack, -1)
        for row, each in zip(stack, source.of_stack(), strict=True):
            row[:] = _load(name, each, checkpoint, options, shard, dtype).reshape(-1)
        loaded.append(tensor)
    return loaded


def _as_parameter(array: np.ndarray) -> tvm.runtime.Tensor:
    """Copy an array into a tensor; if it is large, on huge pages, which decode reads faster."""
    if array.nbytes < 2 * HUGE_PAGE_BYTES:
        return tvm.runtime.tensor(array)
    memory, tensor = huge_zeros(array.shape, array.dtype.name)
    memory[...] = array
    return tensor


def _load(
    name: str, source: Weight, checkpoint: Tensors, options: BuildOptions, shard: int, dtype: str
) -> np.ndarray:
    """Load a weight, packed if it is a matrix."""
    format = options.format_of(name)
    array: Any
    parts = [
        source.share(part, _read(checkpoint, part, format), shard, options.num_shards)
        for part in source.parts
    ]
    if format is not None:
        array = concatenate(parts)
    else:
        array = np.concatenate(parts).astype(dtype)
        if source.offset:
            array += array.dtype.type(source.offset)
    if not source.is_matrix:
        return array
    packed: Any = packed_matrix(name, array.shape[0], array.shape[1], options)
    return packed.pack(array)


def _read(
    checkpoint: Tensors, part: Part, format: WeightFormat | None
) -> np.ndarray | QuantizedRows:
    """Read a part; with a format it is quantized, with the codes of the file where it has them."""
    is_as_stored = part.scale == 1 and not part.as_columns
    has_codes = is_as_stored and isinstance(checkpoint.format(part.name), WeightFormat)
    if format is not None and has_codes:
        matrix = checkpoint.read_quantized(part.name, part.shape, part.expert)
        return matrix.map(part.of).converted(format)
    tensor = part.of(checkpoint.read(part.name, part.shape, part.expert))
    if part.scale != 1:
        tensor = tensor.astype("float32") * np.float32(part.scale)
    if format is None:
        return tensor
    try:
        return quantize(tensor, format)
    except ValueError as error:
        raise ValueError(f"{checkpoint.path}: tensor {part.name}: {error}") from None


_OF_KV = re.compile(r"\.(k_proj|v_proj|k_norm|v_norm)\.(weight|bias)$")


def refuse_unread(config: DecoderConfig, checkpoint: Tensors) -> None:
    """Raise a ValueError for a tensor of the text model that nothing reads.

    An unused bias or norm means that the checkpoint is of another kind, and results would be wrong.
    What is not below the names of the text model belongs to something else: encoders of pictures,
    draft layers, heads of other tasks. RoPE tables, which some older files have, are not weights;
    and layers that attend to the K and V of others may have projections and norms of K and V that
    were never trained. Static scales of K and V are for caches, if at all: see `layer_scales`.
    """
    known = {
        part.name for _, each in weights(config, range(config.num_layers)) for part in each.parts
    }
    text_model = f"{config.names.model}.", f"{config.names.lm_head}."
    for name in checkpoint.names():
        if not name.startswith(text_model) or name in known:
            continue
        if "rotary_emb" in name or is_scale(name):
            continue
        layer = re.match(rf"{re.escape(config.names.model)}\.layers\.(\d+)\.", name)
        if layer and config.source_of(int(layer[1])) is not None and _OF_KV.search(name):
            continue
        if layer and int(layer[1]) >= config.num_layers and config.has_draft_layers:
            continue
        if layer and int(layer[1]) >= config.num_layers:
            raise ValueError(
                f"{checkpoint.path} has tensor {name}, and the model has only "
                f"{config.num_layers} layers"
            )
        raise ValueError(
            f"{checkpoint.path} has tensor {name}, which the model of this "
            "configuration does not have"
        )
