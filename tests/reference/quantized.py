# SPDX-License-Identifier: Apache-2.0
"""The specification of quantized rows and pages; see `tir_kernels.codec` for the rules."""

from __future__ import annotations

import ml_dtypes
import numpy as np

SMALLEST_NORMAL = np.float32(2.0**-126)


def hadamard(size: int) -> np.ndarray:
    """The matrix that blocks of `size` values, a power of two, are multiplied with.

    ``[size, size]``, symmetric, its own inverse.
    """
    block = np.ones((1, 1))
    while len(block) < size:
        block = np.block([[block, block], [block, -block]]) / np.sqrt(2)
    return block


def rotate(codec, rows: np.ndarray, v_width: int) -> np.ndarray:
    """Rows ``[..., width]`` in float32, multiplied with Hadamard matrices if the codec does so.

    The columns that are V and the other ones are multiplied apart, each in blocks of the largest
    power of two that divides their number.
    """
    rows = np.asarray(rows, dtype=np.float32)
    if not codec.has_hadamard:
        return rows
    width = rows.shape[-1]
    parts = [rows[..., :v_width]] + ([rows[..., v_width:]] if v_width < width else [])
    rotated = []
    for part in parts:
        size = part.shape[-1] & -part.shape[-1]
        blocks = part.reshape(*part.shape[:-1], part.shape[-1] // size, size)
        with np.errstate(invalid="ignore", over="ignore"):
            blocks = blocks.astype(np.float64) @ hadamard(size)
            rotated.append(blocks.reshape(part.shape).astype(np.float32))
    return np.concatenate(rotated, axis=-1)


def quantize(
    codec, rows: np.ndarray, v_width: int, static: np.ndarray | None = None
) -> tuple[np.ndarray, np.ndarray]:
    """Codes ``[..., width]`` as numbers and scales ``[..., groups]`` of rows as they are rotated.

    Both are float32; the scales are numbers of the codec's type. With `static`, ``[...]`` or what
    broadcasts to it, these are the scales of rows without NaN and infinities.
    """
    rows = np.asarray(rows, dtype=np.float32)
    width = rows.shape[-1]
    codes, scales = np.zeros(rows.shape, np.float32), []
    for begin, end in codec.groups(width, v_width):
        group = rows[..., begin:end]
        with np.errstate(all="ignore"):
            largest, smallest = group.max(-1), group.min(-1)
            extreme = np.maximum(largest, -smallest)
            if codec.limit < 0:
                extreme = np.where(largest > -smallest, largest, smallest)
            scale = rounded_scale(codec, extreme / np.float32(codec.limit))
            scale = np.where(np.abs(scale) < SMALLEST_NORMAL, np.float32(0), scale)
            if static is not None:
                scale = np.broadcast_to(static, scale.shape)
            is_finite = np.isfinite(group).all(-1)
            is_known = is_finite & (scale != 0)
            inverse = np.where(is_known, np.float32(1) / scale, np.float32(0))
            code = np.where(is_known[..., None], group * inverse[..., None], np.float32(0))
        codes[..., begin:end] = nearest_code(codec, code)
        if codec.bits < 8:
            fitted = fitted_scale(codec, scale, code, codes[..., begin:end])
            scale = np.where(is_known & (np.abs(fitted) >= SMALLEST_NORMAL), fitted, scale)
        scales.append(np.where(is_finite, scale, np.float32(np.nan)))
    return codes, np.stack(scales, axis=-1)


def rounded_scale(codec, scale: np.ndarray) -> np.ndarray:
    """Scales rounded to the codec's type, as float32 numbers."""
    scale = scale.astype(np.float32)
    if codec.scale_dtype == "bfloat16":
        scale = scale.astype(ml_dtypes.bfloat16).astype(np.float32)
    return scale


def fitted_scale(codec, scale: np.ndarray, values: np.ndarray, codes: np.ndarray) -> np.ndarray:
    """The scales with the least squared error for codes ``[..., n]`` of `values` over `scale`."""
    with np.errstate(invalid="ignore"):
        products, squares = (codes * values).sum(-1), (codes * codes).sum(-1)
        return rounded_scale(codec, scale * (products / squares))


def nearest_code(codec, values: np.ndarray) -> np.ndarray:
    """The codes nearest to float32 values, as float32 numbers."""
    if codec.name == "float8_e4m3fn":
        limited = np.clip(values, -codec.limit, codec.limit)
        return limited.astype(ml_dtypes.float8_e4m3fn).astype(np.float32)
    lowest, highest = {8: (-127, 127), 5: (-16, 15), 4: (-8, 7)}[codec.bits]
    return np.clip(np.rint(values), lowest, highest).astype(np.float32)


def dequantize(codec, codes: np.ndarray, scales: np.ndarray, v_width: int) -> np.ndarray:
    """Rows ``[..., width]`` in float32, rotated back, of what `quantize` gives."""
    rows = np.empty_like(codes)
    with np.errstate(all="ignore"):  # unused slots hold anything
        for g, (begin, end) in enumerate(codec.groups(codes.shape[-1], v_width)):
            rows[..., begin:end] = codes[..., begin:end] * scales[..., g, None]
    return rotate(codec, rows, v_width)


def keep(
    codec, rows: np.ndarray, v_width: int | None = None, static: np.ndarray | None = None
) -> np.ndarray:
    """Quantize and dequantize rows ``[..., width]``: float32."""
    v_width = rows.shape[-1] if v_width is None else v_width
    kept = quantize(codec, rotate(codec, rows, v_width), v_width, static)
    return dequantize(codec, *kept, v_width)


def code_bytes(codec, codes: np.ndarray) -> np.ndarray:
    """Codes ``[..., width]`` as the bytes ``[..., row_bytes]`` of a page: uint8."""
    if codec.name == "float8_e4m3fn":
        return codes.astype(ml_dtypes.float8_e4m3fn).view(np.uint8)
    if codec.bits == 8:
        return codes.astype(np.int8).view(np.uint8)
    half, unsigned = codes.shape[-1] // 2, (codes + 2 ** (codec.bits - 1)).astype(np.uint8)
    nibbles = unsigned & 15
    planes = [nibbles[..., :half] | nibbles[..., half:] << 4]
    if codec.bits == 5:
        planes.append(np.packbits(unsigned >> 4, axis=-1, bitorder="little"))
    return np.concatenate(planes, axis=-1)


def codes_of(codec, data: np.ndarray) -> np.ndarray:
    """The inverse of `code_bytes`."""
    if codec.name == "float8_e4m3fn":
        return data.view(ml_dtypes.float8_e4m3fn).astype(np.float32)
    if codec.bits == 8:
        return data.view(np.int8).astype(np.float32)
    if codec.bits == 4:
        return np.concatenate([data & 15, data >> 4], axis=-1).astype(np.float32) - 8
    half = data.shape[-1] * 4 // 5  # nibbles of the halves of a row, then a bit for each column
    low, bits = data[..., :half], np.unpackbits(data[..., half:], axis=-1, bitorder="little")
    unsigned = np.concatenate([low & 15, low >> 4], axis=-1) + 16 * bits
    return unsigned.astype(np.float32) - 16


def page_planes(codec, pages: np.ndarray, row_shape: tuple, width: int, v_width: int) -> list:
    """Views of ``pages uint8 [P, page_bytes]``: ``(codec, codes, scales)`` of K, then of V.

    Where one codec serves both there is one entry. `row_shape` is ``(2, Hk, page_size)``, with MLA
    ``(page_size,)``; that of a plane is ``(1, Hk, page_size)``, or the whole. Codes are
    ``[P, *row_shape, row_bytes]``, scales ``[P, *row_shape, groups]``. Codes precede scales.
    """
    codecs = [codec.k] if codec.k == codec.v else [codec.k, codec.v]
    if len(codecs) == 2:
        row_shape = (1, *row_shape[1:])
    num_rows, begin, codes, scales = int(np.prod(row_shape)), 0, [], []
    for each in codecs:
        end = begin + num_rows * each.row_bytes(width)
        codes.append(pages[:, begin:end].reshape(len(pages), *row_shape, each.row_bytes(width)))
        begin = end
    for each in codecs:
        end = begin + num_rows * each.scale_bytes(width, v_width)
        dtype = ml_dtypes.bfloat16 if each.scale_dtype == "bfloat16" else np.float32
        shape = (len(pages), *row_shape, len(each.groups(width, v_width)))
        scales.append(pages[:, begin:end].view(dtype).reshape(shape))
        begin = end
    return list(zip(codecs, codes, scales, strict=True))


def page_parts(codec, pages: np.ndarray, row_shape: tuple, width: int, v_width: int):
    """Return what `page_planes` does, ``codes, scales`` of a codec that serves K and V."""
    ((_, codes, scales),) = page_planes(codec, pages, row_shape, width, v_width)
    return codes, scales


def keep_pages(codec, rows: np.ndarray, v_width: int) -> np.ndarray:
    """Do what `keep` does, for ``[..., 2, Hk, page_size, width]``, K, then V (MLA: any rows)."""
    if codec.k == codec.v:
        return keep(codec.k, rows, v_width)
    planes = (
        keep(each, rows[..., i, :, :, :], v_width) for i, each in enumerate((codec.k, codec.v))
    )
    return np.stack(list(planes), axis=-4)
