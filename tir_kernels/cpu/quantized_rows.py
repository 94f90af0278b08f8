# SPDX-License-Identifier: Apache-2.0
"""Rows of float32 numbers quantized into pages, and read back.

The bits of a number, shifted left by one, with the sign behind them, order numbers by magnitude,
NaN above all. So one maximum finds the value that decides a scale, and whether all are finite.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from tvm.script import tirx as T

from ..layout import QuantizedPages
from ..semantics.hadamard import k_parts
from . import simd
from .codes import load_values, store_codes
from .columns import for_columns
from .hadamard import transform
from .simd import F32, Register, broadcast, load, maximum, reduce_lanes, store, temp, vector_type

VECTORS_AT_ONCE = 8
_INFINITE = 0xFF000000  # the key of infinities; that of NaN is larger
_SMALLEST_NORMAL = 2.0**-126


@contextmanager
def writable(sink, row: Sequence, lanes: int) -> Iterator[tuple]:
    """What a row is to be written to: the sink itself, or numbers that are quantized afterwards.

    Yields
    ------
    Buffer and indices of its leading axes.
    """
    if not isinstance(sink, QuantizedPages):
        yield sink, row
        return
    numbers = T.alloc_buffer((sink.spec.qk_head_dim,), F32)
    yield numbers, ()
    quantize_row(numbers, sink, row, lanes)


def quantize_row(numbers, pages: QuantizedPages, row: Sequence, lanes: int) -> None:
    """Quantize a float32 buffer of one row into pages; it is rotated in place before."""
    codec, groups = pages.codec, pages.groups
    if codec.has_hadamard:
        transform(numbers, (), k_parts(pages.spec), lanes)
    inverse = T.alloc_buffer((len(groups),), F32)
    known = T.alloc_buffer((len(groups),), "uint32")
    for group, (begin, end) in enumerate(groups):
        scale = _Scale(codec, _largest(numbers, begin, end, lanes))
        T.buffer_store(inverse, scale.inverse, [group])
        T.buffer_store(known, scale.mask, [group])
        bits = scale.bits
        if codec.scale_dtype == "bfloat16":
            bits = T.cast(T.shift_right(bits, T.uint32(16)), "uint16")
        else:
            bits = T.reinterpret(F32, bits)
        T.buffer_store(pages.scales, bits, [*row, group])

    def scaled(column, n: int):
        group = pages.group_of(column)
        bits = T.reinterpret(vector_type("uint32", n), load(numbers, (column,), n))
        bits = T.bitwise_and(bits, broadcast(known[group], n))
        value = T.reinterpret(vector_type(F32, n), bits) * broadcast(inverse[group], n)
        return temp(value, n)

    half = pages.spec.qk_head_dim // 2
    for begin, end in ((0, half),) if codec.bits == 4 else groups:

        def columns(start, parts, begin=begin):
            for c in parts:
                column = begin + start + c.start
                at = (column, column + half) if codec.bits == 4 else (column,)
                values = [scaled(i, c.lanes) for i in at]
                store_codes(pages, row, column, c.lanes, values)

        for_columns(end - begin, lanes, VECTORS_AT_ONCE, columns)


def _largest(numbers, begin: int, end: int, lanes: int):
    """The key of the value of the largest magnitude: uint32."""
    largest = Register(1, "uint32", T.uint32(0))

    def columns(start, parts):
        found: dict[int, object] = {}
        for c in parts:
            key = _key(load(numbers, (begin + start + c.start,), c.lanes), c.lanes)
            before = found.get(c.lanes)
            found[c.lanes] = key if before is None else T.max(before, key)
        for n, key in found.items():
            largest.set(T.max(largest.get(), reduce_lanes(key, n, maximum, "uint32")))

    for_columns(end - begin, lanes, VECTORS_AT_ONCE, columns)
    return largest.get()


def _key(value, lanes: int):
    one, last = (broadcast(T.uint32(n), lanes) for n in (1, 31))
    bits = temp(T.reinterpret(vector_type("uint32", lanes), value), lanes, "uint32")
    key = T.bitwise_or(T.shift_left(bits, one), T.shift_right(bits, last))
    return temp(key, lanes, "uint32")


class _Scale:
    """The scale of a group whose largest value has the key `key`.

    `bits` of the scale as float32; `inverse`, or 0 where all codes are 0; `mask` for the bits of
    the group's values: 0 there, else all ones.
    """

    def __init__(self, codec, key):
        is_finite = temp(key < T.uint32(_INFINITE), 1, "bool")
        magnitude, sign = T.shift_right(key, T.uint32(1)), T.shift_left(key, T.uint32(31))
        extreme = magnitude if codec.limit > 0 else T.bitwise_or(magnitude, sign)
        scale = temp(T.reinterpret(F32, extreme) / T.float32(codec.limit))
        bits = temp(T.reinterpret("uint32", scale), 1, "uint32")
        if codec.scale_dtype == "bfloat16":
            odd = T.bitwise_and(T.shift_right(bits, T.uint32(16)), T.uint32(1))
            bits = T.bitwise_and(bits + T.uint32(0x7FFF) + odd, T.uint32(0xFFFF0000))
            bits = temp(bits, 1, "uint32")
        scale = temp(T.reinterpret(F32, bits))
        is_normal = T.abs(scale) >= T.float32(_SMALLEST_NORMAL)
        is_known = temp(T.And(is_finite, is_normal), 1, "bool")
        quiet = T.Select(is_finite, T.uint32(0), T.uint32(0x7FC00000))
        self.bits = temp(T.Select(is_known, bits, quiet), 1, "uint32")
        divisor = T.Select(is_known, scale, T.float32(1))
        self.inverse = T.Select(is_known, T.float32(1) / divisor, T.float32(0))
        self.mask = T.Select(is_known, T.uint32(0xFFFFFFFF), T.uint32(0))


def dequantize_row(pages: QuantizedPages, row: Sequence, sink, sink_row: Sequence, lanes: int):
    """Write the numbers that a quantized row stands for, rounded to the type of `sink`."""
    has_hadamard, width = pages.codec.has_hadamard, pages.spec.qk_head_dim
    target, at = (T.alloc_buffer((width,), F32), ()) if has_hadamard else (sink, sink_row)
    for begin, end in pages.groups:
        for start, n in simd.chunks(end - begin, lanes):
            column = begin + start
            store(target, (*at, column), n, load_values(pages, row, column, n))
    if has_hadamard:
        transform(target, at, k_parts(pages.spec), lanes)
        for start, n in simd.chunks(width, lanes):
            store(sink, (*sink_row, start), n, load(target, (start,), n))
