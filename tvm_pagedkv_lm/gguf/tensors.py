# SPDX-License-Identifier: Apache-2.0
"""`GgufTensors`: the tensors of a GGUF file under the names and in the form of Hugging Face."""

from __future__ import annotations

import re

import numpy as np

from ..formats.weight_formats import QuantizedRows, WeightFormat
from . import experts
from .dequantize import type_name
from .family import GgufFamily
from .file import GgufFile
from .latent import K_PART, V_PART, joined, k_of, v_of
from .quantized import KEPT_TYPES, split_blocks

_FLOATS = ("F32", "F16", "BF16")
# They belong to the rotation, not to the weights.
_ROPE_FACTORS = ("rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight")


class GgufTensors:
    """Reads tensors one at a time, as `checkpoint.Checkpoint` does.

    Parameters
    ----------
    file : GgufFile
    family : GgufFamily
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
        family: GgufFamily,
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
            if name.endswith(V_PART) and k_of(name) in file.tensors:  # read with that one
                continue
            if name in family.stacked:
                for index in range(file.tensors[name].shape[0]):
                    theirs = f"{family.stacked[name]}.{index}.weight"
                    self._names[theirs], self._indices[theirs] = name, index
                continue
            theirs = _name(name, family, file)
            if theirs in self._names:
                raise ValueError(
                    f"{self.path} has the tensors {self._names[theirs]} and {name}; models of "
                    f"architecture {family.architecture} have only one of them"
                )
            self._names[theirs] = name
        self._norm_offset = family.norm_offset
        both = {"q_proj": num_heads, "k_proj": num_kv_heads}
        self._heads = both if family.permutes_heads else {}

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
        if own.endswith(K_PART):
            return joined(self._file.read(own), self._file.read(v_of(own)))
        tensor = self._file.read(own, index)
        if self._norm_offset and name.endswith("norm.weight"):
            return tensor - self._norm_offset  # directories have it when the norm is applied
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
        if own.endswith(K_PART):  # whose codes are of groups of other features
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
        if own.endswith(K_PART):
            found = self._shape_of_both(own)
        if found != tuple(shape):
            raise ValueError(
                f"{self.path}: tensor {own} has shape {list(found)}; expected {list(shape)}"
            )
        return own

    def _shape_of_both(self, own: str) -> tuple[int, ...]:
        """Return the shape of the projection of K and V, of which a tensor has the part of K."""
        tensors, v = self._file.tensors, v_of(own)
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


def _name(name: str, family: GgufFamily, file: GgufFile) -> str:
    """Return the name of a tensor in Hugging Face directories."""
    stem, _, kind = name.rpartition(".")
    layer = re.fullmatch(r"blk\.(\d+)\.(\w+)", stem)
    whole = family.whole_names.get(f"{layer[2]}.{kind}") if layer else None
    if layer is not None and whole is not None:
        return f"model.layers.{layer[1]}.{whole}"
    if layer is not None and layer[2] in experts.TENSORS and kind in ("weight", "bias"):
        return experts.tensor_name(layer[1], layer[2], kind)
    if layer is None:
        theirs = family.model_tensor(stem)
    else:
        theirs = family.layer_tensor(layer[2])
        theirs = theirs and f"model.layers.{layer[1]}.{theirs}"
    if theirs is None or kind not in ("weight", "bias"):
        raise ValueError(
            f"{file.path} has the tensor {name}, which models of architecture "
            f"{family.architecture} do not have"
        )
    return f"{theirs}.{kind}"


def _halves(rows: np.ndarray, num_heads: int) -> np.ndarray:
    """Return rows whose rotated pairs are adjacent with the pairs half a head apart."""
    pairs = rows.reshape(num_heads, -1, 2, *rows.shape[1:])
    return pairs.swapaxes(1, 2).reshape(rows.shape)
