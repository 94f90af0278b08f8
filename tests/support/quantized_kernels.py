# SPDX-License-Identifier: Apache-2.0
"""Kernels in NumPy over quantized pages: those of `python_kernels` on the numbers of the codes."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import tvm

from tir_kernels.codec import CODECS, Codec

from ..reference import quantized
from .python_kernels import view


class QuantizedLayer:
    """The pages of a layer, as `tests.reference.quantized` specifies them.

    Parameters
    ----------
    codec : str
    layer : dict
        Fields of the layer, as ``pagedkv.create`` takes them.
    page_size : int
    """

    def __init__(self, codec: str, layer: dict[str, Any], page_size: int):
        self.codec: Codec = CODECS[codec]
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
        """What the layer tells ``pagedkv.create`` of its codec."""
        sizes = {
            "row_bytes": self.codec.row_bytes(self.width),
            "scale_bytes": self.codec.scale_bytes(self.width, self.v_width),
            "page_bytes": self.page_bytes,
            "revision": self.codec.revision,
        }
        return {"kv_dtype": self.codec.name, "codec": {"name": self.codec.name, **sizes}}

    def parts(self, pages: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Codes and scales of ``uint8 [P, page_bytes]``."""
        return quantized.page_parts(self.codec, pages, self.row_shape, self.width, self.v_width)

    def numbers(self, pages: np.ndarray) -> np.ndarray:
        """The pages with dequantized rows: float32 ``[P, *row_shape, width]``."""
        codes, scales = self.parts(pages)
        return quantized.dequantize(
            self.codec,
            quantized.codes_of(self.codec, codes),
            scales.astype(np.float32),
            self.v_width,
        )

    def keep(self, rows: np.ndarray) -> np.ndarray:
        """What the pages give back of rows ``[..., width]``."""
        return quantized.keep(self.codec, rows, self.v_width)

    def write(self, pages: np.ndarray, index: tuple, rows: np.ndarray) -> None:
        """Quantize rows ``[..., width]`` into the rows at an index of the pages."""
        rotated = quantized.rotate(self.codec, rows, self.v_width)
        new_codes, new_scales = quantized.quantize(self.codec, rotated, self.v_width)
        codes, scales = self.parts(pages)
        codes[index] = quantized.code_bytes(self.codec, new_codes)
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

    def _transpose_append(self, pages, k, v, position_map) -> None:
        pages, rows = view(pages), np.stack([view(k), view(v)], axis=1)
        for row, slot in zip(rows, view(position_map), strict=True):
            if slot >= 0:
                page, offset = divmod(int(slot), self.page_size)
                self.write(pages, (page, ..., offset, slice(None)), row)

    def _transpose_append_mla(self, pages, kv, position_map) -> None:
        pages = view(pages)
        for row, slot in zip(view(kv), view(position_map), strict=True):
            if slot >= 0:
                self.write(pages, divmod(int(slot), self.page_size), row)

    def _debug_get_kv(self, pages, position_map, k, v, layer) -> None:
        slots, numbers = view(position_map), self.numbers(view(pages))
        rows = numbers[slots // self.page_size, :, :, slots % self.page_size]
        view(k)[layer], view(v)[layer] = rows[:, 0], rows[:, 1]

    def _debug_get_kv_mla(self, pages, position_map, kv, layer) -> None:
        slots, numbers = view(position_map), self.numbers(view(pages))
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
