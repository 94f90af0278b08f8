# SPDX-License-Identifier: Apache-2.0
"""Pages in a file: which ones, their shape, their type, and the rows they hold."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import ml_dtypes
import numpy as np
import tvm_ffi

from .._codecs import CODECS, codec_of
from .._functions import global_function
from .inspection import CacheInspection

if TYPE_CHECKING:
    from tir_kernels.codec import Codec

_ITEMSIZE = {"float32": 4, "float16": 2, "bfloat16": 2}


def page_groups(cache: CacheInspection) -> list[dict[str, Any]]:
    """Return the page groups of a checkpoint, in the order of their ids.

    Each is an entry of `KVCache.description` about a layer, with a ``name`` and the ``pool`` of its
    pages. There is one for each layer, and behind these one for the states of each recurrent layer.
    """
    layers = sorted(cache._kept_layers, key=lambda layer: layer["page_group"])
    num_groups = 1 + max((layer["group"] for layer in layers), default=-1)
    groups = [
        {**x, "name": f"layer.{x['page_group']}", "pool": x["group"], "has_states": False}
        for x in layers
    ]
    for x in layers:
        if x["kind"] == "recurrent":
            pool, name = num_groups + x["state_group"], f"states.{x['page_group']}"
            states = {"name": name, "pool": pool, "has_states": True}
            states["page_bytes"] = x["state_bytes"]
            groups.append({**x, **states, "sections": []})
    return groups


class PoolPages:
    """The pages of some sequences in a pool, as checkpoints have them, each once.

    Parameters
    ----------
    cache : KVCache
    index : int
        Id of a page group of the pool.
    seq_ids, lengths : list of int
    has_history : bool
        Whether pages that the sequences have given up, but that are cached, are among them.

    Attributes
    ----------
    ids : page ids
    num_slots : slots in use of each of them
    numbers : per sequence, indices into these
    """

    def __init__(
        self,
        cache: CacheInspection,
        index: int,
        seq_ids: list[int],
        lengths: list[int],
        has_history: bool,
    ):
        page_size, has_states = (
            cache.description["page_size"],
            page_groups(cache)[index]["has_states"],
        )
        pages_of = global_function("pagedkv.checkpoint_pages")
        number_of: dict[int, int] = {}
        slots: list[int] = []
        self.numbers: list[list[int]] = []
        for seq_id, length in zip(seq_ids, lengths, strict=True):
            table = list(pages_of(cache, seq_id, index, has_history))
            end_page = 0 if has_states else -(-length // page_size)  # states fill their pages
            start = (end_page - len(table)) * page_size
            self.numbers.append([])
            for page in table:
                number = number_of.setdefault(page, len(number_of))
                if number == len(slots):
                    slots.append(0)
                slots[number] = max(slots[number], min(page_size, length - start))
                start += page_size
                self.numbers[-1].append(number)
        self.ids, self.num_slots = list(number_of), slots

    @staticmethod
    def shape(values: list[int], block: range) -> tvm_ffi.Shape:
        return tvm_ffi.Shape(tuple(values[block.start : block.stop]))


@dataclass(frozen=True)
class PageFormat:
    """The pages of a layer.

    Parameters
    ----------
    kv_dtype : str
        A type of numbers, or the name of a codec.
    row_shape : tuple of int
        Rows of a page: ``(2, num_kv_heads, page_size)``, where a slot has one row
        ``(page_size,)``, and of states ``(num_heads, key_dim)``.
    width, v_width : int
        Elements of a row, and those of its leading columns that are V; of layers with rows of K
        and of V, elements of either.
    codec_page_bytes : int
        Bytes of a quantized page; 0 without a codec.
    """

    kv_dtype: str
    row_shape: tuple[int, ...]
    width: int
    v_width: int
    codec_page_bytes: int = 0

    @classmethod
    def of(cls, cache: CacheInspection, index: int, kv_dtype: str | None = None) -> PageFormat:
        """Return the format of a page group of a cache, or the one it would have with a `kv_dtype`.

        Raises
        ------
        ValueError
            If there is no such `kv_dtype`, or only K and V can have another one.
        """
        info, page_size = page_groups(cache)[index], cache.description["page_size"]
        if info["has_states"]:
            state_shape, width = (info["num_heads"], info["key_dim"]), info["value_dim"]
            return cls(info["state_dtype"], state_shape, width, width)
        if "row_width" in info:
            if kv_dtype not in (None, info["kv_dtype"]):
                raise ValueError(
                    f"the {info['kind']} layer {info['id']} has rows of {kv_dtype}, and only K and "
                    "V can be converted"
                )
            return cls(info["kv_dtype"], (page_size,), *[info["row_width"]] * 2)
        is_mla = info["kind"] == "mla"
        row_shape = (page_size,) if is_mla else (2, info["num_kv_heads"], page_size)
        rows = row_shape, info["qk_head_dim"], info["v_head_dim"]
        if kv_dtype is None or kv_dtype == info["kv_dtype"]:
            codec_page_bytes = info["page_bytes"] if info["is_quantized"] else 0
            return cls(info["kv_dtype"], *rows, codec_page_bytes)
        if not is_mla and info["qk_head_dim"] != info["v_head_dim"]:
            raise ValueError(
                f"layer {index}: pages whose rows of K and V have two widths cannot be converted"
            )
        if kv_dtype in _ITEMSIZE:
            return cls(kv_dtype, *rows)
        codec = codec_of(kv_dtype)
        if codec is None:
            known = ", ".join([*_ITEMSIZE, *CODECS])
            raise ValueError(f"it has pages of kv_dtype {kv_dtype!r}; known: {known}")
        codec.check_row(*rows[1:])
        num_bytes = codec.page_bytes(math.prod(row_shape), *rows[1:])
        return cls(kv_dtype, *rows, num_bytes)

    @property
    def dtype(self) -> str:
        """Type of the elements of a page."""
        return "uint8" if self.codec_page_bytes else self.kv_dtype

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of a page."""
        if len(self.row_shape) == 3 and self.width != self.v_width:  # rows of K, then those of V
            return (math.prod(self.row_shape[1:]) * (self.width + self.v_width),)
        return (self.codec_page_bytes,) if self.codec_page_bytes else (*self.row_shape, self.width)

    @property
    def num_bytes(self) -> int:
        """Bytes of a page."""
        return self.codec_page_bytes or math.prod(self.shape) * _ITEMSIZE[self.kv_dtype]

    def numbers(self, pages: np.ndarray) -> np.ndarray:
        """Return the rows of pages as numbers.

        Parameters
        ----------
        pages : uint8 ``[n, num_bytes]``

        Returns
        -------
        float32 ``[n, *row_shape, width]``
        """
        shape = (len(pages), *self.row_shape)
        if not self.codec_page_bytes:
            dtype = ml_dtypes.bfloat16 if self.kv_dtype == "bfloat16" else self.kv_dtype
            return pages.view(dtype).astype(np.float32).reshape(*shape, self.width)
        codec, widths = codec_of(self.kv_dtype), (self.width, self.v_width)
        assert codec is not None
        parts = [
            self._dequantized(
                section.codec,
                np.ascontiguousarray(pages[:, section.codes]),
                np.ascontiguousarray(pages[:, section.scales]),
            )
            for section in codec.sections(math.prod(self.row_shape), *widths)
        ]
        return np.concatenate(parts, axis=1).reshape(*shape, self.width)

    def _dequantized(self, codec: Codec, codes: np.ndarray, scales: np.ndarray) -> np.ndarray:
        """Return rows ``[n, num_rows, width]`` of bytes of codes and of scales, ``[n, ...]``."""
        shape = (len(codes), codes.shape[1] // codec.row_bytes(self.width))
        if codec.is_packed:
            stored = np.zeros((*shape, self.width), np.uint8)
            codec.unpack(codes.reshape(*shape, -1), stored)
            rows = stored.astype(np.float32) + codec.lowest
        else:
            code_type = np.int8 if codec.is_integer else getattr(ml_dtypes, codec.name)
            rows = codes.view(code_type).astype(np.float32).reshape(*shape, self.width)
        scale_type = ml_dtypes.bfloat16 if codec.scale_dtype == "bfloat16" else np.float32
        groups = codec.groups(self.width, self.v_width)
        numbers = scales.view(scale_type).astype(np.float32).reshape(*shape, len(groups))
        with np.errstate(all="ignore"):  # a file may hold anything
            for g, (begin, end) in enumerate(groups):
                rows[..., begin:end] *= numbers[..., g, None]
            return self._without_hadamard(rows) if codec.has_hadamard else rows

    def _without_hadamard(self, rows: np.ndarray) -> np.ndarray:
        """Multiply rows with the matrices that they were multiplied with, their own inverses."""
        parts = np.split(rows, [self.v_width], axis=-1)
        multiplied = []
        for part in parts:
            width = part.shape[-1]
            size = width & -width
            blocks = part.reshape(*part.shape[:-1], -1, max(size, 1)).astype(np.float64)
            multiplied.append((blocks @ _hadamard(size)).reshape(part.shape))
        return np.concatenate(multiplied, axis=-1).astype(np.float32)


def _hadamard(size: int) -> np.ndarray:
    """Return the symmetric orthogonal matrix ``[size, size]``; `size` is a power of two."""
    matrix = np.ones((1, 1))
    while len(matrix) < size:
        matrix = np.block([[matrix, matrix], [matrix, -matrix]]) / math.sqrt(2)
    return matrix
