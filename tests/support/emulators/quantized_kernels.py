# SPDX-License-Identifier: Apache-2.0
"""Kernels in NumPy over quantized pages: those of `python_kernels` on the numbers of the codes."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import tvm

from tir_kernels.codec import Codec, CodecPair, codec_of

from ...reference import quantized
from .python_kernels import view


class QuantizedLayer:
    """The pages of a layer, as `tests.reference.quantized` specifies them.

    Parameters
    ----------
    codec : str
        A codec, or a pair of them.
    layer : dict
        Fields of the layer, as ``pagedkv.create`` takes them.
    page_size : int
    """

    def __init__(self, codec: str, layer: dict[str, Any], page_size: int):
        self.codec: Codec | CodecPair = codec_of(codec)
        self.is_mla = layer["kind"] == "mla"
        self.width: int = layer["qk_head_dim"]
        self.v_width: int = layer["v_head_dim"] if self.is_mla else self.width
        heads = () if self.is_mla else (2, layer["num_kv_heads"])
        self.row_shape: tuple[int, ...] = (*heads, page_size)
        self.page_size = page_size
        self.num_rows = int(np.prod(self.row_shape))
        self.page_bytes = self.codec.page_bytes(self.num_rows, self.width, self.v_width)

    @property
    def fields(self) -> dict[str, Any]:
        """Return the layer's description of its codec for ``pagedkv.create``."""
        sizes = {
            "row_bytes": self.codec.k.row_bytes(self.width),
            "scale_bytes": self.codec.k.scale_bytes(self.width, self.v_width),
            "page_bytes": self.page_bytes,
            "revision": self.codec.revision,
        }
        if self.codec.k != self.codec.v:
            sizes["v_row_bytes"] = self.codec.v.row_bytes(self.width)
            sizes["v_scale_bytes"] = self.codec.v.scale_bytes(self.width, self.v_width)
        return {"kv_dtype": self.codec.name, "codec": {"name": self.codec.name, **sizes}}

    def planes(self, pages: np.ndarray) -> list:
        """Views of ``uint8 [P, page_bytes]``; see `reference.quantized.page_planes`."""
        return quantized.page_planes(self.codec, pages, self.row_shape, self.width, self.v_width)

    def parts(self, pages: np.ndarray) -> list[np.ndarray]:
        """Codes and scales of ``uint8 [P, page_bytes]``, of K and V or of both."""
        return [part for _, codes, scales in self.planes(pages) for part in (codes, scales)]

    def numbers(self, pages: np.ndarray) -> np.ndarray:
        """The pages with dequantized rows: float32 ``[P, *row_shape, width]``."""
        planes = [
            quantized.dequantize(
                codec, quantized.codes_of(codec, codes), scales.astype(np.float32), self.v_width
            )
            for codec, codes, scales in self.planes(pages)
        ]
        return np.concatenate(planes, axis=1)

    def write(self, pages: np.ndarray, index: tuple, rows: np.ndarray) -> None:
        """Quantize rows into those at an index of the pages.

        Rows are ``[2, Hk, width]`` for an index of a slot and ``[n, 2, Hk, page_size, width]`` for
        one of pages; with MLA ``[width]`` and ``[n, page_size, width]``.
        """
        planes = self.planes(pages)
        own = np.split(rows, len(planes), axis=0 if isinstance(index[0], int) else 1)
        for (codec, codes, scales), plane in zip(planes, own, strict=True):
            rotated = quantized.rotate(codec, plane, self.v_width)
            new_codes, new_scales = quantized.quantize(codec, rotated, self.v_width)
            codes[index] = quantized.code_bytes(codec, new_codes)
            scales[index] = new_scales

    def kernels(self, plain: dict[str, Callable]) -> dict[str, Callable]:
        """Kernels over the quantized pages, from those over float32 pages."""
        own = {
            "copy_single_page": self._copy_single_page,
            "copy_pages": self._copy_pages,
            "compact_copy": self._compact_copy,
        }
        kernels = {name: own.get(name) or partial(self._attend, plain[name]) for name in plain}
        if self.is_mla:
            more = {
                "transpose_append_mla": self._transpose_append_mla,
                "debug_get_kv_mla": self._debug_get_kv_mla,
            }
        else:
            more = {
                "transpose_append": self._transpose_append,
                "debug_get_kv": self._debug_get_kv,
            }
        return kernels | more

    def _attend(self, kernel: Callable, *args: Any) -> None:
        """Call a kernel that reads pages, or one that has nothing to do with them."""

        def converted(arg: Any) -> Any:
            if str(getattr(arg, "dtype", "")) != "uint8":
                return arg
            return tvm.runtime.tensor(self.numbers(view(arg)))

        kernel(*map(converted, args))

    def _transpose_append(self, pages, k, v, slots) -> None:
        pages, rows = view(pages), np.stack([view(k), view(v)], axis=1)
        for row, slot in zip(rows, view(slots), strict=True):
            if slot >= 0:
                page, offset = divmod(int(slot), self.page_size)
                self.write(pages, (page, ..., offset, slice(None)), row)

    def _transpose_append_mla(self, pages, kv, slots) -> None:
        pages = view(pages)
        for row, slot in zip(view(kv), view(slots), strict=True):
            if slot >= 0:
                self.write(pages, divmod(int(slot), self.page_size), row)

    def _debug_get_kv(self, pages, slots, k, v, layer) -> None:
        slots, numbers = view(slots), self.numbers(view(pages))
        rows = numbers[slots // self.page_size, :, :, slots % self.page_size]
        view(k)[layer], view(v)[layer] = rows[:, 0], rows[:, 1]

    def _debug_get_kv_mla(self, pages, slots, kv, layer) -> None:
        slots, numbers = view(slots), self.numbers(view(pages))
        view(kv)[layer] = numbers[slots // self.page_size, slots % self.page_size]

    def _copy_single_page(self, pages, source, destination, length) -> None:
        for part in self.parts(view(pages)):
            part[destination, ..., :length, :] = part[source, ..., :length, :]

    def _copy_pages(self, pages, copies) -> None:
        for copy in view(copies).T:
            self._copy_single_page(pages, *copy)

    def _compact_copy(self, pages, length_indptr, slots, batch_size) -> None:
        slots = view(slots)
        assert view(length_indptr)[batch_size] == slots.shape[1]
        size = self.page_size
        for part in self.parts(view(pages)):
            for source, destination in slots.T:
                row = part[source // size, ..., source % size, :]
                part[destination // size, ..., destination % size, :] = row
