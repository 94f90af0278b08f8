# SPDX-License-Identifier: Apache-2.0
"""The sources of a decoder's weights: tensors of a checkpoint, by name and shape."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

import numpy as np
import tvm

from tir_kernels.spec import ITEMSIZE
from tvm_pagedkv.measure import HUGE_PAGE_BYTES, huge_zeros

from ..blocks.decoder import Decoder, weights
from ..config.decoder_config import DecoderConfig
from ..config.options import BuildOptions
from ..formats.weight_formats import QuantizedRows, WeightFormat, concatenate, quantize
from ..kernels.linear.packed import packed_matrix
from ..weights.static_scales import is_scale
from ..weights.tensors import Tensors
from ..weights.weight_parts import Part, Weight
from .progress import report

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


def refuse_unread(config: DecoderConfig, checkpoint: Tensors) -> None:
    """Raise a ValueError for a tensor of the text model that nothing reads.

    An unused bias or norm means that the checkpoint is of another kind, and results would be wrong.
    What is not below the names of the text model belongs to something else: encoders of pictures,
    draft layers, heads of other tasks. RoPE tables, which some older files have, are not weights,
    and parts of layers may know tensors that were never trained. Static scales of K and V are for
    caches, if at all: see `layer_scales`.
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
        if layer and int(layer[1]) >= config.num_layers and config.has_draft_layers:
            continue
        if layer and int(layer[1]) >= config.num_layers:
            raise ValueError(
                f"{checkpoint.path} has tensor {name}, and the model has only "
                f"{config.num_layers} layers"
            )
        if layer and any(
            part.is_unused(name) for part in config.layers[int(layer[1])].parts.values()
        ):
            continue
        raise ValueError(
            f"{checkpoint.path} has tensor {name}, which the model of this "
            "configuration does not have"
        )
