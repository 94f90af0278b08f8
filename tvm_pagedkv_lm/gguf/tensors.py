# SPDX-License-Identifier: Apache-2.0
"""`GgufTensors`: the tensors of a GGUF file under the names and in the form of Hugging Face."""

from __future__ import annotations

import re

import numpy as np

from ..formats.weight_formats import QuantizedRows, WeightFormat
from . import experts, gemma, latent
from .dequantize import type_name
from .file import GgufFile
from .quantized import KEPT_TYPES, split_blocks

_MODEL = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
    **gemma.MODEL_TENSORS,
}
_LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_NORMS_AFTER = {
    "post_attention_norm": "post_attention_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
_EXPERTS = _LAYER | {"post_attention_norm": "post_attention_layernorm"}
_GEMMA = _LAYER | _NORMS_AFTER | {"ffn_norm": "pre_feedforward_layernorm"}
_LAYER_OF = {
    "gemma2": _GEMMA,
    "gemma3": _GEMMA,
    "olmo2": _LAYER | _NORMS_AFTER,
    "exaone4": _LAYER | _NORMS_AFTER,
    "glm4moe": _EXPERTS,
    "gpt-oss": _EXPERTS,
    "gemma3n": _GEMMA | gemma.GEMMA3N_TENSORS,
    "gemma4": _GEMMA | gemma.GEMMA4_TENSORS,
    "deepseek2": _LAYER | latent.TENSORS,
    "phi3": _LAYER | {"attn_qkv": "self_attn.qkv_proj", "ffn_up": "mlp.gate_up_proj"},
}
_FLOATS = ("F32", "F16", "BF16")
_SPLIT, _JOINED = ".attn_k_b.weight", ".attn_v_b.weight"  # one tensor of directories
# They belong to the rotation, not to the weights.
_ROPE_FACTORS = ("rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight")


class GgufTensors:
    """Reads tensors one at a time, as `checkpoint.Checkpoint` does.

    Parameters
    ----------
    file : GgufFile
    architecture : str
        ``general.architecture``.
    num_heads, num_kv_heads : int
    num_layers, num_extra_layers : int
        Layers of the model, and layers behind them, which are left out.

    Raises
    ------
    ValueError
        If a tensor is unknown, or two stand for the same weights; the message names it.
    """

    def __init__(
        self,
        file: GgufFile,
        architecture: str,
        num_heads: int,
        num_kv_heads: int,
        num_layers: int = 0,
        num_extra_layers: int = 0,
    ):
        self.path, self._file = file.path, file
        self._names: dict[str, str] = {}
        self._indices: dict[str, int] = {}  # of names whose matrix is one of several of a tensor
        ends = range(num_layers, num_layers + num_extra_layers)
        left_out = tuple(f"blk.{layer}." for layer in ends)
        for name in file.tensors:
            if name in _ROPE_FACTORS or name.startswith(left_out):
                continue
            if name.endswith(_JOINED) and _k_of(name) in file.tensors:  # read with that one
                continue
            if name in gemma.STACKED:
                for index in range(file.tensors[name].shape[0]):
                    theirs = f"{gemma.STACKED[name]}.{index}.weight"
                    self._names[theirs], self._indices[theirs] = name, index
                continue
            theirs = _name(name, architecture, file)
            if theirs in self._names:
                raise ValueError(
                    f"{self.path} has the tensors {self._names[theirs]} and {name}; models of "
                    f"architecture {architecture} have only one of them"
                )
            self._names[theirs] = name
        self._has_offset = architecture in ("gemma2", "gemma3")
        # llama.cpp rotates adjacent pairs in these architectures, so Q and K are permuted.
        is_permuted = architecture in ("llama", "smollm3")
        self._heads = {"q_proj": num_heads, "k_proj": num_kv_heads} if is_permuted else {}

    def names(self) -> list[str]:
        """Return the names of all tensors."""
        return [*self._names]

    def read(
        self, name: str, shape: tuple[int, ...], expert: tuple[int, int] | None = None
    ) -> np.ndarray:
        """Return a tensor as float32.

        Parameters
        ----------
        shape : tuple of int
        expert : (int, int), optional
            Which of how many tensors of this shape is read.

        Raises
        ------
        ValueError
            If it is missing, has another shape, or a type that is not supported.
        """
        index = self._indices.get(name) if expert is None else expert[0]
        own = self._find(name, shape, expert)
        if own.endswith(_SPLIT):
            return latent.joined(self._file.read(own), self._file.read(_v_of(own)))
        tensor = self._file.read(own, index)
        if self._has_offset and name.endswith("norm.weight"):
            return tensor - 1  # Hugging Face adds one when it applies the norm
        num_heads = self._heads.get(name.split(".")[-2])
        return tensor if num_heads is None else _halves(tensor, num_heads)

    def format(self, name: str) -> WeightFormat | str | None:
        """Return the format of a tensor; its type's name if that has another one, None if floats.

        A name that is not in the file has the format None.
        """
        if name not in self._names:
            return None
        own = self._names[name]
        kind = type_name(self._file.tensors[own].type_id)
        if own.endswith(_SPLIT):  # whose codes are of groups of other features
            return None if kind in _FLOATS else kind
        return None if kind in _FLOATS else KEPT_TYPES.get(kind, kind)

    def read_quantized(
        self, name: str, shape: tuple[int, ...], expert: tuple[int, int] | None = None
    ) -> QuantizedRows:
        """Return a matrix with the codes of the file, if `format` is a `WeightFormat`.

        Raises
        ------
        ValueError
            As `read`.
        """
        format = self.format(name)
        assert isinstance(format, WeightFormat)
        raw = self._file.read_bytes(self._find(name, shape, expert))
        index = self._indices.get(name) if expert is None else expert[0]
        try:
            matrix = split_blocks(raw if index is None else raw[index], format)
        except ValueError as error:
            raise ValueError(f"{self.path}: tensor {self._names[name]} {error}") from None
        num_heads = self._heads.get(name.split(".")[-2])
        return matrix if num_heads is None else matrix.map(lambda x: _halves(x, num_heads))

    def _find(
        self, name: str, shape: tuple[int, ...], expert: tuple[int, int] | None = None
    ) -> str:
        """Return the name of a tensor in the file, after a check of its shape."""
        shape = shape if expert is None else (expert[1], *shape)
        if name not in self._names:
            raise ValueError(f"{self.path} lacks tensor {name}; expected shape {list(shape)}")
        own = self._names[name]
        found = self._file.tensors[own].shape
        if name in self._indices:
            found = found[1:]
        if own.endswith(_SPLIT):
            found = self._shape_of_both(own)
        if found != tuple(shape):
            raise ValueError(
                f"{self.path}: tensor {own} has shape {list(found)}; expected {list(shape)}"
            )
        return own

    def _shape_of_both(self, own: str) -> tuple[int, ...]:
        """Return the shape of the projection of K and V, of which a tensor has the part of K."""
        tensors, v = self._file.tensors, _v_of(own)
        if v not in tensors:
            raise ValueError(f"{self.path} lacks the tensor {v}")
        k_shape, v_shape = tensors[own].shape, tensors[v].shape
        if len(k_shape) != 3 or (k_shape[0], k_shape[1]) != (v_shape[0], v_shape[-1]):
            raise ValueError(
                f"{self.path}: tensors {own} and {v} have shapes {list(k_shape)} and "
                f"{list(v_shape)}, which do not fit"
            )
        return k_shape[0] * (k_shape[2] + v_shape[1]), k_shape[1]

    def dtype(self) -> str:
        """Return the type of the matrices, or the 16-bit type that rounds quantized ones less.

        A quantized number is a small integer times a float16 scale. It fits the 11 bits of
        float16's mantissa better than the 8 of bfloat16's.
        """
        found = {type_name(t.type_id) for t in self._file.tensors.values() if len(t.shape) > 1}
        if found <= {"F32"}:
            return "float32"
        return "bfloat16" if found <= {"F32", "BF16"} else "float16"


def _name(name: str, architecture: str, file: GgufFile) -> str:
    """Return the name of a tensor in Hugging Face directories."""
    stem, _, kind = name.rpartition(".")
    layer = re.fullmatch(r"blk\.(\d+)\.(\w+)", stem)
    whole = gemma.WHOLE_NAMES.get(architecture, {}).get(f"{layer[2]}.{kind}") if layer else None
    if layer is not None and whole is not None:
        return f"model.layers.{layer[1]}.{whole}"
    if layer is not None and layer[2] in experts.TENSORS and kind in ("weight", "bias"):
        return experts.tensor_name(layer[1], layer[2], kind)
    if layer is not None and layer[2] == "attn_sinks":
        return f"model.layers.{layer[1]}.self_attn.sinks"
    if layer is None:
        theirs = _MODEL.get(stem)
    else:
        theirs = _LAYER_OF.get(architecture, _LAYER).get(layer[2])
        theirs = theirs and f"model.layers.{layer[1]}.{theirs}"
    if theirs is None or kind not in ("weight", "bias"):
        raise ValueError(
            f"{file.path} has the tensor {name}, which models of architecture {architecture} do "
            "not have"
        )
    return f"{theirs}.{kind}"


def _v_of(name: str) -> str:
    """Return the name of the tensor with the part of V, of one with the part of K."""
    return name.removesuffix(_SPLIT) + _JOINED


def _k_of(name: str) -> str:
    """Return the name of the tensor with the part of K, of one with the part of V."""
    return name.removesuffix(_JOINED) + _SPLIT


def _halves(rows: np.ndarray, num_heads: int) -> np.ndarray:
    """Return rows whose rotated pairs are adjacent with the pairs half a head apart."""
    pairs = rows.reshape(num_heads, -1, 2, *rows.shape[1:])
    return pairs.swapaxes(1, 2).reshape(rows.shape)
