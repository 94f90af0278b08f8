# SPDX-License-Identifier: Apache-2.0
"""Pages of a layer in a file: their shape, their type, and the rows they hold."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import ml_dtypes
import numpy as np

from .._codecs import CODECS, codec_of
from .inspection import CacheInspection

if TYPE_CHECKING:
    from tir_kernels.codec import Codec

_ITEMSIZE = {"float32": 4, "float16": 2, "bfloat16": 2}


@dataclass(frozen=True)
class PageFormat:
    """The pages of a layer.

    Parameters
    ----------
    kv_dtype : str
        A type of numbers, or the name of a codec.
    row_shape : tuple of int
        Rows of a page: ``(2, num_kv_heads, page_size)``, of MLA layers ``(page_size,)``.
    width, v_width : int
        Elements of a row, and those of its leading columns that are V; MLA only: they differ.
    codec_page_bytes : int
        Bytes of a quantized page; 0 without a codec.
    """

    kv_dtype: str
    row_shape: tuple[int, ...]
    width: int
    v_width: int
    codec_page_bytes: int = 0

    @classmethod
    def of(cls, cache: CacheInspection, layer: int, kv_dtype: str | None = None) -> PageFormat:
        """Return the format of a layer of a cache, or the one it would have with a `kv_dtype`.

        Raises
        ------
        ValueError
            If there is no such `kv_dtype`.
        """
        info, page_size = cache.description["layers"][layer], cache.description["page_size"]
        is_mla = info["kind"] == "mla"
        row_shape = (page_size,) if is_mla else (2, info["num_kv_heads"], page_size)
        rows = row_shape, info["qk_head_dim"], info["v_head_dim"]
        if kv_dtype is None or kv_dtype == info["kv_dtype"]:
            codec_page_bytes = info["page_bytes"] if info["is_quantized"] else 0
            return cls(info["kv_dtype"], *rows, codec_page_bytes)
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
        planes, num_rows = [codec.k], math.prod(self.row_shape)
        if codec.v != codec.k:
            planes, num_rows = [codec.k, codec.v], num_rows // 2
        sizes = [num_rows * each.row_bytes(self.width) for each in planes]
        sizes += [num_rows * each.scale_bytes(*widths) for each in planes]
        sections = np.split(pages, np.cumsum(sizes), axis=1)
        parts = [
            self._dequantized(each, *map(np.ascontiguousarray, sections[n :: len(planes)][:2]))
            for n, each in enumerate(planes)
        ]
        return np.concatenate(parts, axis=1).reshape(*shape, self.width)

    def _dequantized(self, codec: Codec, codes: np.ndarray, scales: np.ndarray) -> np.ndarray:
        """Return rows ``[n, num_rows, width]`` of bytes of codes and of scales, ``[n, ...]``."""
        shape = (len(codes), codes.shape[1] // codec.row_bytes(self.width))
        if codec.is_packed:  # the two halves of a row in one byte each, then the fifth bits
            halves, bits = np.split(codes.reshape(*shape, -1), [self.width // 2], axis=-1)
            unsigned = np.concatenate([halves & 15, halves >> 4], axis=-1)
            if codec.has_bit_plane:
                unsigned |= np.unpackbits(bits, axis=-1, bitorder="little") << 4
            rows = unsigned.astype(np.float32) + codec.lowest
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
