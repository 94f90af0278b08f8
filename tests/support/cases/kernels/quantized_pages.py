# SPDX-License-Identifier: Apache-2.0
"""Quantized pages made by the reference, and read by it."""

from __future__ import annotations

import numpy as np

from tir_kernels.layout import page_bytes, page_shape, rows_per_slot
from tir_kernels.spec import KernelSpec

from ....reference import quantized

GARBAGE = 0xA5  # of pages that nobody has written


def pool(spec: KernelSpec, num_pages: int) -> np.ndarray:
    """Quantized pages full of garbage: uint8 ``[num_pages, page_bytes]``."""
    return np.full((num_pages, page_bytes(spec)), GARBAGE, np.uint8)


def page_planes(spec: KernelSpec, pages: np.ndarray) -> list:
    """Views of K and of V, or of both; see `reference.quantized.page_planes`."""
    shape = page_shape(spec)[:-1]
    return quantized.page_planes(spec.codec, pages, shape, spec.qk_head_dim, spec.v_head_dim)


def page_parts(spec: KernelSpec, pages: np.ndarray) -> list[np.ndarray]:
    """All of these views: codes and scales of K, then those of V where they differ."""
    return [part for _, codes, scales in page_planes(spec, pages) for part in (codes, scales)]


def rows_of_planes(spec: KernelSpec, rows: np.ndarray) -> list[np.ndarray]:
    """Cut rows ``[n, rows_per_slot, width]`` as `page_planes` cuts pages."""
    return [rows] if spec.codec.k == spec.codec.v else np.split(rows, 2, axis=1)


def slot_parts(spec: KernelSpec, pages: np.ndarray, slots) -> list:
    """``(codec, codes, scales)`` of slots, numbers in float32 ``[n, rows, ...]``; K, then V."""
    page, offset = np.asarray(slots) // spec.page_size, np.asarray(slots) % spec.page_size

    def rows(part: np.ndarray) -> np.ndarray:
        num_rows = int(np.prod(part.shape[1:-2]))
        return part[page, ..., offset, :].reshape(len(page), num_rows, part.shape[-1])

    return [
        (codec, quantized.codes_of(codec, rows(codes)), rows(scales).astype(np.float32))
        for codec, codes, scales in page_planes(spec, pages)
    ]


def write_rows(spec: KernelSpec, pages: np.ndarray, slots, rows: np.ndarray) -> None:
    """Quantize rows ``[n, rows_per_slot, width]`` into slots, as the reference does."""
    page, offset = np.asarray(slots) // spec.page_size, np.asarray(slots) % spec.page_size
    planes = zip(page_planes(spec, pages), rows_of_planes(spec, rows), strict=True)
    for (codec, *parts), own in planes:
        rotated = quantized.rotate(codec, own, spec.v_head_dim)
        numbers, scales = quantized.quantize(codec, rotated, spec.v_head_dim)
        for part, values in zip(parts, (quantized.code_bytes(codec, numbers), scales), strict=True):
            shape = (len(page), *part.shape[1:-2], part.shape[-1])
            with np.errstate(invalid="ignore"):
                part[page, ..., offset, :] = values.reshape(shape).astype(part.dtype)


def read_rows(spec: KernelSpec, pages: np.ndarray, slots) -> np.ndarray:
    """Decode slots: float32 ``[n, rows_per_slot, width]``."""
    planes = slot_parts(spec, pages, slots)
    return np.concatenate([quantized.dequantize(*each, spec.v_head_dim) for each in planes], axis=1)


def quantized_pool(spec: KernelSpec, pages: np.ndarray) -> np.ndarray:
    """Quantize float32 pages of the shape of `layout.pages_shape`.

    Slots whose rows are all NaN are left alone: their codes are random bytes, and every second
    scale is NaN.
    """
    rng, num_slots = np.random.default_rng(0), len(pages) * spec.page_size
    found = rng.integers(0, 256, (len(pages), page_bytes(spec)), dtype=np.uint8)
    for _, _, scales in page_planes(spec, found):
        scales[::2] = np.nan
    rows = np.moveaxis(pages, -2, 1).reshape(num_slots, rows_per_slot(spec), -1)
    slots = np.flatnonzero(~np.isnan(rows).all((1, 2)))
    write_rows(spec, found, slots, rows[slots])
    return found
