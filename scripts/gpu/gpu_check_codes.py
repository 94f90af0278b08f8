# SPDX-License-Identifier: Apache-2.0
"""Quantized pages that are timed: random codes and scales, and the numbers that they stand for."""

from __future__ import annotations

import torch

from tests.reference import quantized
from tir_kernels.codec import CODECS

# The largest magnitudes are a few units, as those of normally distributed rows are.
_SCALES = {"int8": 0.02, "float8_e4m3fn": 0.008, "int4": 0.4}


def random_pages(kv_dtype: str, rows: tuple[int, ...], width: int, device) -> torch.Tensor:
    """uint8 ``[rows[0], page_bytes]``: pages of ``rows[1:]`` rows, without codes of NaN."""
    codec = CODECS[kv_dtype]
    num_rows = rows[1] * rows[2] * rows[3]
    shape = rows[0], codec.page_bytes(num_rows, width, width)
    pages = torch.randint(0, 256, shape, dtype=torch.uint8, device=device)
    if kv_dtype == "float8_e4m3fn":
        pages[(pages & 0x7F) == 0x7F] = 0
    scales = _parts(codec, pages, num_rows, width)[1]
    scales.copy_((0.5 + torch.rand(scales.shape, device=device)) * _SCALES[kv_dtype])
    return pages


def numbers(kv_dtype: str, pages: torch.Tensor, rows: tuple[int, ...], width: int) -> torch.Tensor:
    """Decode pages ``[n, page_bytes]`` to float32 ``[n, *rows[1:], width]``."""
    codec = CODECS[kv_dtype]
    codes, scales = _parts(codec, pages, rows[1] * rows[2] * rows[3], width)
    if codec.bits == 4:
        values = torch.cat([codes & 15, codes >> 4], -1).float() - 8
    else:
        dtype = torch.int8 if codec.storage_dtype == "int8" else torch.float8_e4m3fn
        values = codes.contiguous().view(dtype).float()
    groups = scales.shape[-1]
    values = (values.unflatten(-1, (groups, -1)) * scales.float()[..., None]).flatten(-2)
    if codec.has_hadamard:
        size = width & -width
        matrix = torch.tensor(quantized.hadamard(size), dtype=torch.float32, device=pages.device)
        values = (values.unflatten(-1, (-1, size)) @ matrix).flatten(-2)
    return values.reshape(len(pages), *rows[1:], width)


def _parts(codec, pages: torch.Tensor, num_rows: int, width: int) -> tuple[torch.Tensor, ...]:
    """Views of the codes and the scales of pages: ``[n, num_rows, ...]``."""
    end = num_rows * codec.row_bytes(width)
    scales_end = end + num_rows * codec.scale_bytes(width, width)
    dtype = torch.bfloat16 if codec.scale_dtype == "bfloat16" else torch.float32
    scales = pages.view(dtype)[:, end // dtype.itemsize : scales_end // dtype.itemsize]
    return pages[:, :end].unflatten(1, (num_rows, -1)), scales.unflatten(1, (num_rows, -1))
