# SPDX-License-Identifier: Apache-2.0
"""Rows of float32 numbers quantized into pages, and read back.

The bits of a number, shifted left by one, with the sign behind them, order numbers by magnitude,
NaN above all. So one maximum finds the value that decides a scale, and whether all are finite.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from tvm.script import tirx as T

from .. import vectors
from ..layout import QuantizedPages
from ..semantics.hadamard import k_parts
from . import simd
from .codes import load_values, store_codes
from .columns import for_columns
from .hadamard import transform
from .shuffles import next_power_of_two, reduce_each
from .simd import (
    F32,
    Register,
    broadcast,
    constant,
    load,
    maximum,
    shuffle,
    store,
    temp,
    vector_type,
)

VECTORS_AT_ONCE = 8
_INFINITE = 0xFF000000  # the key of infinities; that of NaN is larger
_SMALLEST_NORMAL = 0x00800000  # the bits of 2**-126


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
    padded = len(groups) + lanes  # the last ones are stored by the vector
    inverse = T.alloc_buffer((padded,), F32)
    known = T.alloc_buffer((padded,), "uint32")
    for first in range(0, len(groups), lanes):
        batch = groups[first : first + lanes]
        keys = [_largest(numbers, begin, end, lanes) for begin, end in batch]
        scale = _Scale(codec, reduce_each(keys, lanes, maximum, "uint32"), len(batch))
        store(inverse, (first,), scale.lanes, scale.inverse)
        vectors.store(known, (first,), scale.lanes, scale.mask)
        scale.store(pages, row, first, len(batch))

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
    """A vector of keys, the largest of which is that of the value of the largest magnitude."""
    largest = Register(lanes, "uint32", broadcast(T.uint32(0), lanes))

    def columns(start, parts):
        for c in parts:
            key, n = _key(load(numbers, (begin + start + c.start,), c.lanes), c.lanes), c.lanes
            if n == 1:
                key, n = broadcast(key, lanes), lanes
            while n < lanes:
                key, n = temp(shuffle([key, key], range(2 * n)), 2 * n, "uint32"), 2 * n
            largest.set(T.max(largest.get(), key))

    for_columns(end - begin, lanes, VECTORS_AT_ONCE, columns)
    return largest.get()


def _key(value, lanes: int):
    one, last = (broadcast(T.uint32(n), lanes) for n in (1, 31))
    bits = temp(T.reinterpret(vector_type("uint32", lanes), value), lanes, "uint32")
    key = T.bitwise_or(T.shift_left(bits, one), T.shift_right(bits, last))
    return temp(key, lanes, "uint32")


class _Scale:
    """The scales of some groups, whose largest values have the keys `key`: vectors.

    `bits` of the scales as float32; `inverse`, or 0 where all codes are 0; `mask` for the bits of a
    group's values: 0 there, else all ones.
    """

    def __init__(self, codec, key, num_groups: int):
        self.lanes = lanes = next_power_of_two(num_groups)
        self.has_words = codec.scale_dtype == "bfloat16"
        key = temp(key, lanes, "uint32")
        wide, number = (vector_type(dtype, lanes) for dtype in ("uint32", F32))

        def integer(value: int):
            return broadcast(T.uint32(value), lanes)

        is_finite = key < integer(_INFINITE)
        extreme = T.shift_right(key, integer(1))
        if codec.limit < 0:
            extreme = T.bitwise_or(extreme, T.shift_left(key, integer(31)))
        scale = T.reinterpret(number, extreme) / constant(codec.limit, lanes)
        bits = temp(T.reinterpret(wide, temp(scale, lanes)), lanes, "uint32")
        if self.has_words:
            odd = T.bitwise_and(T.shift_right(bits, integer(16)), integer(1))
            bits = T.bitwise_and(bits + integer(0x7FFF) + odd, integer(0xFFFF0000))
            bits = temp(bits, lanes, "uint32")
        scale = T.reinterpret(number, bits)
        magnitude = T.bitwise_and(bits, integer(0x7FFFFFFF))
        is_known = T.And(is_finite, magnitude >= integer(_SMALLEST_NORMAL))
        quiet = T.Select(is_finite, integer(0), integer(0x7FC00000))
        self.bits = temp(T.Select(is_known, bits, quiet), lanes, "uint32")
        one, zero = (constant(x, lanes) for x in (1.0, 0.0))
        self.inverse = T.Select(is_known, one / T.Select(is_known, scale, one), zero)
        self.mask = T.Select(is_known, integer(0xFFFFFFFF), integer(0))

    def store(self, pages: QuantizedPages, row: Sequence, first: int, num_groups: int) -> None:
        """Store the scales of the groups of a row from `first` on."""
        bits, dtype = self.bits, F32
        if self.has_words:
            bits, dtype = T.shift_right(bits, broadcast(T.uint32(16), self.lanes)), "uint16"
            bits = T.cast(bits, vector_type(dtype, self.lanes))
        else:
            bits = T.reinterpret(vector_type(F32, self.lanes), bits)
        if num_groups == self.lanes:
            vectors.store(pages.scales, (*row, first), self.lanes, bits)
            return
        bits = temp(bits, self.lanes, dtype)
        for group in range(num_groups):
            T.buffer_store(pages.scales, shuffle([bits], [group]), [*row, first + group])


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
