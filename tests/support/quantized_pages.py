# SPDX-License-Identifier: Apache-2.0
"""Quantized pages made by the reference, and read by it."""

from __future__ import annotations

import numpy as np

from tir_kernels.layout import page_bytes, page_shape, rows_per_slot
from tir_kernels.spec import KernelSpec

from ..reference import quantized

GARBAGE = 0xA5  # of pages that nobody has written


def pool(spec: KernelSpec, num_pages: int) -> np.ndarray:
    """Quantized pages full of garbage: uint8 ``[num_pages, page_bytes]``."""
    return np.full((num_pages, page_bytes(spec)), GARBAGE, np.uint8)


def page_parts(spec: KernelSpec, pages: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Views of the codes and the scales of pages; see `reference.quantized.page_parts`."""
    shape = page_shape(spec)[:-1]
    return quantized.page_parts(spec.codec, pages, shape, spec.qk_head_dim, spec.v_head_dim)


def slot_parts(spec: KernelSpec, pages: np.ndarray, slots) -> tuple[np.ndarray, np.ndarray]:
    """Codes as numbers and scales of slots: ``[n, rows_per_slot, ...]`` float32; K, then V."""
    page, offset = np.asarray(slots) // spec.page_size, np.asarray(slots) % spec.page_size
    codes, scales = (
        x[page, ..., offset, :].reshape(len(page), rows_per_slot(spec), x.shape[-1])
        for x in page_parts(spec, pages)
    )
    return quantized.codes_of(spec.codec, codes), scales.astype(np.float32)


def write_rows(spec: KernelSpec, pages: np.ndarray, slots, rows: np.ndarray) -> None:
    """Quantize rows ``[n, rows_per_slot, width]`` into slots, as the reference does."""
    rotated = quantized.rotate(spec.codec, rows, spec.v_head_dim)
    numbers, scales = quantized.quantize(spec.codec, rotated, spec.v_head_dim)
    codes = quantized.code_bytes(spec.codec, numbers)
    page, offset = np.asarray(slots) // spec.page_size, np.asarray(slots) % spec.page_size
    for part, values in zip(page_parts(spec, pages), (codes, scales), strict=True):
        shape = (len(page), *part.shape[1:-2], part.shape[-1])
        with np.errstate(invalid="ignore"):
            part[page, ..., offset, :] = values.reshape(shape).astype(part.dtype)


def read_rows(spec: KernelSpec, pages: np.ndarray, slots) -> np.ndarray:
    """What slots stand for: float32 ``[n, rows_per_slot, width]``."""
    return quantized.dequantize(spec.codec, *slot_parts(spec, pages, slots), spec.v_head_dim)


def quantized_pool(spec: KernelSpec, pages: np.ndarray) -> np.ndarray:
    """Quantize float32 pages of the shape of `layout.pages_shape`.

    Slots whose rows are all NaN are left alone: their codes are random bytes, and every second
    scale is NaN.
    """
    rng, num_slots = np.random.default_rng(0), len(pages) * spec.page_size
    found = rng.integers(0, 256, (len(pages), page_bytes(spec)), dtype=np.uint8)
    page_parts(spec, found)[1][::2] = np.nan
    rows = np.moveaxis(pages, -2, 1).reshape(num_slots, rows_per_slot(spec), -1)
    slots = np.flatnonzero(~np.isnan(rows).all((1, 2)))
    write_rows(spec, found, slots, rows[slots])
    return found
