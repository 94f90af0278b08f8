# SPDX-License-Identifier: Apache-2.0
"""Buffers, loops and the copy of a row, for all kernels that move rows."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from tvm.script import tirx as T

from ..layout import QuantizedPages, first_element
from ..spec import ITEMSIZE, STORED_ITEMSIZE
from . import quantized_rows, simd

# Work below this many bytes moved (20 us or so) is not worth waking a thread.
SERIAL_BELOW_BYTES = 512 * 1024


def match(handle, shape: Sequence, dtype: str, strides: Sequence | None = None):
    """Match a tensor that may start at any element of its allocation."""
    align = ITEMSIZE.get(dtype, 4)
    return T.match_buffer(
        handle,
        shape,
        dtype,
        strides=strides,
        elem_offset=first_element(),
        align=align,
        offset_factor=1,
    )


def match_strided(handle, shape: Sequence, dtype: str):
    """Do what `match` does, with any strides but the last one: rows are contiguous."""
    outer = [T.int64() for _ in shape[:-1]]
    # The stride of an axis of one element may be anything, and does not matter.
    last = T.int64(1) if int(shape[-1]) > 1 else T.int64()
    return match(handle, [*shape[:-1], T.int64(int(shape[-1]))], dtype, [*outer, last])


def for_each(count, bytes_each, body: Callable) -> None:
    """Run ``body(i)`` for ``i < count``, on all threads where there is enough to move.

    `bytes_each` (an int or an int64 expression) is what one call of `body` reads and writes. The
    calls must not depend on each other; each thread takes a contiguous range.
    """
    with T.If(T.cast(count, "int64") * bytes_each < SERIAL_BELOW_BYTES):
        with T.Then(), T.serial(count) as i:
            body(i)
        with T.Else(), T.parallel(count) as i:
            body(i)


def copy_row(
    source, source_row: Sequence, sink, sink_row: Sequence, lanes: int, begin: int = 0
) -> None:
    """Copy elements `begin` to the end of a row; bit for bit where the types are the same.

    Parameters
    ----------
    source, sink : buffers whose last axis is the row, or `QuantizedPages`
        A row is quantized on its way into quantized pages, and dequantized on its way out.
    source_row, sink_row : indices of the leading axes.
    lanes : float32 lanes of a vector.
    """
    is_quantized = [isinstance(pages, QuantizedPages) for pages in (source, sink)]
    if is_quantized[0]:
        source = source.of_row(source_row)
    if is_quantized[1]:
        sink = sink.of_row(sink_row)
    if all(is_quantized):
        for part in ("codes", "scales"):
            _copy_elements(
                getattr(source, part), source_row, getattr(sink, part), sink_row, lanes, 0
            )
    elif is_quantized[0]:
        quantized_rows.dequantize_row(source, source_row, sink, sink_row, lanes)
    else:
        with quantized_rows.writable(sink, sink_row, lanes) as (target, target_row):
            _copy_elements(source, source_row, target, target_row, lanes, begin)


def _copy_elements(source, source_row, sink, sink_row, lanes: int, begin: int) -> None:
    width, dtype = int(source.shape[-1]), str(source.dtype)
    same = dtype == str(sink.dtype)
    through = dtype if same else simd.F32
    for start, count in simd.chunks(width - begin, lanes * 4 // STORED_ITEMSIZE[through]):
        dim = begin + start
        value = simd.load(source, (*source_row, dim), count, to=through)
        simd.store(sink, (*sink_row, dim), count, value, source=through)
