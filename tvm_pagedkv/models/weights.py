# SPDX-License-Identifier: Apache-2.0
"""The sources of a decoder's weights: tensors of a checkpoint, by name and shape."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import tvm

from tir_kernels.spec import ITEMSIZE

from .._progress import report
from .config import DecoderConfig
from .decoder import Decoder
from .options import BuildOptions
from .packed import packed_matrix
from .source import Tensors
from .weight_formats import QuantizedRows, WeightFormat, concatenate, quantize


class Part(NamedTuple):
    """A tensor of a checkpoint, or a range of its rows."""

    name: str
    shape: tuple[int, ...]  # of the whole tensor
    rows: tuple[int, int] | None = None

    @property
    def size(self) -> int:
        """Number of elements of the range."""
        rows = self.shape[0] if self.rows is None else self.rows[1] - self.rows[0]
        return rows * math.prod(self.shape[1:])


@dataclass(frozen=True)
class Weight:
    """One weight of the model: parts of a checkpoint, concatenated along the first axis.

    Parameters
    ----------
    parts : tuple of Part
    is_matrix : bool
        Whether the result is packed for the linear kernel.
    split : {"rows", "columns", "first"}, optional
        How workers that share the layer divide every part: by rows or by columns; or "first": only
        the first worker has it, and the others have zeros. None: every worker has all of it.
    offset : float
        Constant that is added.
    """

    parts: tuple[Part, ...]
    is_matrix: bool
    split: str | None = None
    offset: float = 0.0

    def share(self, part, shard: int, num_shards: int):
        """Return the share of a part, quantized or not, that worker `shard` of `num_shards` has."""
        if isinstance(part, QuantizedRows):
            return part.map(lambda array: self.share(array, shard, num_shards))
        if self.split is None:
            return part
        if self.split == "first":
            return part if shard == 0 else np.zeros_like(part)
        return np.split(part, num_shards, axis=("rows", "columns").index(self.split))[shard]


def weights(config: DecoderConfig, layers: range) -> Iterator[tuple[str, Weight]]:
    """Yield the name and the source of every weight of these layers of the model."""
    size = (config.vocab_size, config.hidden_size)
    embedding = Weight((Part("model.embed_tokens.weight", size),), True)
    yield "embed_tokens", embedding
    yield (
        "lm_head.weight",
        embedding if config.tied_embeddings else Weight((Part("lm_head.weight", size),), True),
    )
    for index, layer in enumerate(layers):
        ours, theirs = f"layers.{index}", f"model.layers.{layer}"
        yield from _attention(config, f"{ours}.self_attn", f"{theirs}.self_attn")
        yield from _mlp(config, f"{ours}.mlp", f"{theirs}.mlp")
        for place, name in vars(config.norms).items():
            if name:
                yield f"{ours}.{place}.weight", _norm(config, f"{theirs}.{name}")
    yield "norm.weight", _norm(config, "model.norm")


def _norm(config: DecoderConfig, name: str, width: int | None = None) -> Weight:
    part = Part(f"{name}.weight", (width or config.hidden_size,))
    return Weight((part,), False, offset=config.norm_offset)


def _attention(c: DecoderConfig, ours: str, theirs: str) -> Iterator[tuple[str, Weight]]:
    q_width, kv_width = c.num_heads * c.head_dim, c.num_kv_heads * c.head_dim
    outputs = {"q_proj": q_width, "k_proj": kv_width, "v_proj": kv_width}
    fused = f"{theirs}.qkv_proj" if c.has_fused_weights else None
    yield from _rows(
        f"{ours}.qkv_proj", theirs, outputs, c.hidden_size, bias=c.qkv_bias, fused=fused
    )
    yield from _columns(f"{ours}.o_proj", f"{theirs}.o_proj", (c.hidden_size, q_width), c.o_bias)
    if c.qk_norm:
        widths = (c.head_dim, c.head_dim) if c.qk_norm == "head" else (q_width, kv_width)
        for name, width in zip("qk", widths, strict=True):
            yield f"{ours}.qk_norm.{name}_weight", _norm(c, f"{theirs}.{name}_norm", width)


def _mlp(c: DecoderConfig, ours: str, theirs: str) -> Iterator[tuple[str, Weight]]:
    outputs = dict.fromkeys(("gate_proj", "up_proj"), c.intermediate_size)
    fused = f"{theirs}.gate_up_proj" if c.has_fused_weights else None
    yield from _rows(
        f"{ours}.gate_up_proj", theirs, outputs, c.hidden_size, bias=c.mlp_bias, fused=fused
    )
    shape = (c.hidden_size, c.intermediate_size)
    yield from _columns(f"{ours}.down_proj", f"{theirs}.down_proj", shape, c.mlp_bias)


def _rows(
    ours: str,
    theirs: str,
    outputs: dict[str, int],
    in_features: int,
    *,
    bias: bool,
    fused: str | None,
) -> Iterator[tuple[str, Weight]]:
    """Yield projections of one input as one matrix. Workers divide the rows of each projection.

    Parameters
    ----------
    outputs : dict
        Name below `theirs` -> number of output features.
    fused : str, optional
        Name of the tensor that holds all of them.
    """

    def parts(kind: str, columns: tuple[int, ...]) -> tuple[Part, ...]:
        if fused is None:
            return tuple(
                Part(f"{theirs}.{name}.{kind}", (width, *columns))
                for name, width in outputs.items()
            )
        ends = np.cumsum([*outputs.values()]).tolist()
        whole = (ends[-1], *columns)
        return tuple(
            Part(f"{fused}.{kind}", whole, (end - width, end))
            for end, width in zip(ends, outputs.values(), strict=True)
        )

    yield f"{ours}.weight", Weight(parts("weight", (in_features,)), True, "rows")
    if bias:
        yield f"{ours}.bias", Weight(parts("bias", ()), False, "rows")


def _columns(
    ours: str, theirs: str, shape: tuple[int, int], bias: bool
) -> Iterator[tuple[str, Weight]]:
    """Yield a projection whose input features the workers divide."""
    yield f"{ours}.weight", Weight((Part(f"{theirs}.weight", shape),), True, "columns")
    if bias:
        yield f"{ours}.bias", Weight((Part(f"{theirs}.bias", shape[:1]),), False, "first")


def matrix_bytes(config: DecoderConfig, stages: Iterable[BuildOptions]) -> int:
    """Return the bytes of the matrices that multiply rows, of all stages and workers of a model."""
    total = 0
    for options in stages:
        for name, weight in weights(config, options.layers_of(config)):
            is_used = options.is_last if name == "lm_head.weight" else name != "embed_tokens"
            if weight.is_matrix and is_used:
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
        layer's tensor has no use; the message names it.
    """
    _refuse_unused(config, checkpoint)
    sources = dict(weights(config, options.layers_of(config)))
    loaded = []
    parameters = [*Decoder(config, options).named_parameters()]
    for index, (name, parameter) in enumerate(parameters):
        report("loading weights", index, len(parameters))
        source, dtype = sources[name], np.dtype(parameter.dtype)
        format = options.format_of(name)
        array: Any
        parts = [
            source.share(_read(checkpoint, part, format), shard, options.num_shards)
            for part in source.parts
        ]
        if format is not None:
            array = concatenate(parts)
        else:
            array = np.concatenate(parts).astype(dtype)
            if source.offset:
                array += dtype.type(source.offset)
        if source.is_matrix:
            packed: Any = packed_matrix(name, array.shape[0], array.shape[1], options)
            array = packed.pack(array)
        loaded.append(tvm.runtime.tensor(array))
    return loaded


def _read(
    checkpoint: Tensors, part: Part, format: WeightFormat | None
) -> np.ndarray | QuantizedRows:
    """Read a part; with a format it is quantized, with the codes of the file where it has them."""
    if format is not None and isinstance(checkpoint.format(part.name), WeightFormat):
        matrix = checkpoint.read_quantized(part.name, part.shape)
        if part.rows is not None:
            rows = slice(*part.rows)
            matrix = matrix.map(lambda array: array[rows])
        return matrix.converted(format)
    tensor = checkpoint.read(part.name, part.shape)
    if part.rows is not None:
        tensor = tensor[slice(*part.rows)]
    if format is None:
        return tensor
    try:
        return quantize(tensor, format)
    except ValueError as error:
        raise ValueError(f"{checkpoint.path}: tensor {part.name}: {error}") from None


def _refuse_unused(config: DecoderConfig, checkpoint: Tensors) -> None:
    """Raise a ValueError for a layer's tensor that the model does not use.

    An unused bias or norm means that the checkpoint is of another kind, and results would be wrong.
    RoPE tables, which some older files have, are not weights.
    """
    known = {
        part.name for _, each in weights(config, range(config.num_layers)) for part in each.parts
    }
    for name in checkpoint.names():
        layer = re.match(r"model\.layers\.(\d+)\.", name)
        if layer is None or name in known or "rotary_emb" in name:
            continue
        if int(layer[1]) >= config.num_layers:
            raise ValueError(
                f"{checkpoint.path} has tensor {name}, and the model has only "
                f"{config.num_layers} layers"
            )
        raise ValueError(
            f"{checkpoint.path} has tensor {name}, which the model of this "
            "configuration does not have"
        )
