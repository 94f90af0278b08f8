# SPDX-License-Identifier: Apache-2.0
"""Codes of quantized rows as vectors: to numbers and back; see `tir_kernels.codec`."""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Sequence

from tvm.script import tirx as T

from ...codec import BitPlane, Codec
from ...layout import QuantizedPages
from ...spec import VectorTarget
from ..isa.bytes import packing
from ..isa.shuffles import concatenate
from ..isa.simd import F32, broadcast, constant, ramp, rint, temp, vector_type

_FLOAT8_TO_HALF = 2.0**8  # the exponents of float16 and of e4m3 begin so far apart
# Bits of a power of two that is worth 2**20 times a number of exponent field `e`, less `e` itself,
# and what makes the result of `_nearest_float8` a code: ``units - 8 + 8 * (e - (127 - 7))``.
_POWER = (20 << 23) + (-8 - 8 * (127 - 7) - 8 * 20) % 128


def load_values(pages: QuantizedPages, row: Sequence, column, lanes: int):
    """The numbers that the codes of `lanes` columns stand for: float32.

    Parameters
    ----------
    row : indices of the row, less the last axis.
    column : a multiple of `lanes`, an int or an expression.
    """
    codec = pages.codec
    if codec.is_packed:
        # Products of a few bits with bfloat16 are exact: so is their sum, fused or not.
        codes = T.cast(_load_packed(pages, row, column, lanes), vector_type(F32, lanes))
        scale = temp(_scale(pages, row, pages.group_of(column)))
        offset = scale * T.float32(codec.lowest)
        return codes * broadcast(scale, lanes) + broadcast(offset, lanes)
    codes = _load_bytes(pages, row, column, lanes)
    if codec.group_size or pages.groups[0][1] % lanes == 0:
        return codes * broadcast(_scale(pages, row, pages.group_of(column)), lanes)
    first, second = (broadcast(_scale(pages, row, group), lanes) for group in range(2))
    is_first = ramp(column, lanes) < broadcast(T.int32(pages.groups[0][1]), lanes)
    return codes * T.Select(is_first, first, second)


def _load_bytes(pages: QuantizedPages, row: Sequence, column, lanes: int):
    """The codes of `lanes` columns, a byte each, as float32 numbers that `_scale` scales."""
    codes = pages.codes[(*row, ramp(column, lanes))]
    if pages.codec.is_integer:
        return T.cast(T.cast(codes, vector_type("int32", lanes)), vector_type(F32, lanes))
    return _float8_to_float(codes, lanes, pages.spec.target)


def _load_packed(pages: QuantizedPages, row: Sequence, column, lanes: int):
    """The packed codes of `lanes` columns, less the lowest code: int32."""
    codes = None
    for begin, plane in pages.codec.planes_of(pages.spec.qk_head_dim):
        load = _load_single_bits if plane.has_neighbours else _load_bits
        bits = load(pages, row, begin, plane, column, lanes)
        codes = bits if codes is None else T.bitwise_or(codes, bits)
    return codes


def _load_bits(pages: QuantizedPages, row: Sequence, begin: int, plane: BitPlane, column, lanes):
    """The bits of `lanes` columns in a plane without neighbours, which begins at a byte of the row.

    They are where the code has them, in an int32 each.
    """
    width, wide = pages.spec.qk_head_dim, vector_type("int32", lanes)
    byte, shift = _position(plane, column, width)
    data = T.cast(pages.codes[(*row, ramp(begin + byte, lanes))], wide)
    bits = T.bitwise_and(
        T.shift_right(data, broadcast(shift, lanes)), broadcast(T.int32(plane.mask), lanes)
    )
    return _moved(bits, plane, lanes)


def _position(plane: BitPlane, column, width: int) -> tuple:
    """Return the byte of a plane without neighbours that has a column, and its lowest bit there."""
    num_bytes = plane.num_bytes(width)
    if isinstance(column, int):
        return column % num_bytes, T.int32(column // num_bytes * plane.num_bits)
    firsts = range(num_bytes, width, num_bytes)  # a division would take longer
    index = functools.reduce(operator.add, [T.cast(column >= n, "int32") for n in firsts])
    return column % num_bytes, index * plane.num_bits


def _load_single_bits(pages: QuantizedPages, row: Sequence, begin: int, plane, column, lanes: int):
    """As `_load_bits`, for 16 columns at most in a plane of single bits.

    Lanes get the byte or the word with all their bits, as often as it fits, and shift it.
    """
    first, wide = begin + column // 8, vector_type("int32", lanes)
    if lanes <= 8:
        data, size = pages.codes[(*row, first)], 8
    else:
        data, size = T.reinterpret("uint16", pages.codes[(*row, ramp(first, 2))]), 16
    repeated = broadcast(temp(data, 1, f"uint{size}"), lanes * 32 // size)
    shifts = ramp(size - plane.first_bit + column % size, lanes)
    bits = T.shift_right(T.reinterpret(wide, repeated), shifts)
    return T.bitwise_and(bits, broadcast(T.int32(1 << plane.first_bit), lanes))


def load_unpacked(pages: QuantizedPages, row: Sequence, column: int, num_columns: int):
    """The codes of columns, less the lowest code, a byte each: int32, four columns a lane.

    Only of codecs with planes of high bits. Within `packing.mask_scope`.
    """
    codes = None
    for begin, plane in pages.codec.planes_of(pages.spec.qk_head_dim):
        unpack = _unpack_single_bits if plane.has_neighbours else _unpack_bits
        bits = unpack(pages, row, begin, plane, column, num_columns)
        codes = bits if codes is None else T.bitwise_or(codes, bits)
    return codes


def _unpack_bits(pages: QuantizedPages, row: Sequence, begin: int, plane, column, num_columns: int):
    """The bits of columns in a plane without neighbours, in a byte each."""
    width = pages.spec.qk_head_dim
    size = math.gcd(plane.num_bytes(width), num_columns)  # columns side by side in memory
    lanes, parts = size // 4, []
    for start in range(column, column + num_columns, size):
        byte, shift = _position(plane, start, width)
        data = pages.codes[(*row, ramp(begin + byte, size))]
        bits = T.shift_right(
            T.reinterpret(f"int32x{lanes}", data), broadcast(T.int32(shift), lanes)
        )
        bits = T.bitwise_and(bits, broadcast(T.int32(plane.mask * 0x01010101), lanes))
        parts.append(temp(_moved(bits, plane, lanes), lanes, "int32"))
    return concatenate(parts, lanes, "int32")


def _unpack_single_bits(
    pages: QuantizedPages, row: Sequence, begin: int, plane, column, num_columns: int
):
    """The bits of columns in a plane of single bits, in a byte each."""
    lanes = num_columns // 4
    data = pages.codes[(*row, ramp(begin + column // 8, num_columns // 8))]
    mask = T.reinterpret(f"uint{num_columns}", data)
    bits = T.reinterpret(f"int32x{lanes}", packing.select(mask, num_columns))
    bit = T.int32(0x01010101 << plane.first_bit)
    return T.bitwise_and(bits, broadcast(bit, lanes))


def _moved(bits, plane: BitPlane, lanes: int):
    """The lowest bits of int32 lanes, or of bytes in them, moved to where the code has them."""
    if plane.first_bit == 0:
        return bits
    return T.shift_left(bits, broadcast(T.int32(plane.first_bit), lanes))


def _scale(pages: QuantizedPages, row: Sequence, group):
    """Return the factor of the codes of a group."""
    scale = pages.scale(row, group)
    if not pages.codec.is_integer and pages.spec.target.has_f16_convert:
        return scale * T.float32(_FLOAT8_TO_HALF)
    return scale


def _float8_to_float(codes, lanes: int, target: VectorTarget):
    """Bits of e4m3 numbers as float32. Those of NaN become 480: nobody appends them.

    Where float16 is converted in hardware, the numbers are 2**-8 of that; see `_scale`.
    """
    if target.has_f16_convert:
        # The sign, extended over the upper bits, is shifted to where float16 has it, and beyond the
        # exponent once more, where it is cleared.
        words = T.cast(
            T.reinterpret(vector_type("int8", lanes), codes), vector_type("int16", lanes)
        )
        words = T.shift_left(words, broadcast(T.int16(7), lanes))
        words = T.bitwise_and(words, broadcast(T.int16(0xBFFF - (1 << 16)), lanes))
        half = T.reinterpret(vector_type("float16", lanes), words)
        return T.cast(half, vector_type(F32, lanes))
    bits = temp(T.cast(codes, vector_type("uint16", lanes)), lanes, "uint16")
    magnitude = T.bitwise_and(bits, broadcast(T.uint16(0x7F), lanes))
    wide, number = vector_type("uint32", lanes), vector_type(F32, lanes)
    magnitude = temp(T.cast(magnitude, wide), lanes, "uint32")
    moved = T.shift_left(magnitude, broadcast(T.uint32(20), lanes))
    moved = moved + broadcast(T.uint32((127 - 7) << 23), lanes)
    small = T.cast(T.cast(magnitude, vector_type("int32", lanes)), number)
    small = small * constant(2.0**-9, lanes)
    is_small = magnitude < broadcast(T.uint32(8), lanes)
    value = T.Select(is_small, small, T.reinterpret(number, moved))
    sign = T.bitwise_and(T.cast(bits, wide), broadcast(T.uint32(0x80), lanes))
    sign = T.shift_left(sign, broadcast(T.uint32(24), lanes))
    return T.reinterpret(number, T.bitwise_or(T.reinterpret(wide, value), sign))


def _nearest_float8(value, lanes: int):
    """Bits of the e4m3 numbers nearest to float32 values, even ones at ties: int32, as a byte.

    Values are 448 at most, or so near that this is the nearest number. A power of two whose last
    bit is worth what that of the result is, added to the magnitude, rounds it: its bits grow by as
    many units. Numbers below 2**-6 have the units of 2**-6.
    """
    wide, number = vector_type("int32", lanes), vector_type(F32, lanes)

    def integer(value: int):
        return broadcast(T.int32(value), lanes)

    bits = temp(T.reinterpret(wide, value), lanes, "int32")
    exponent = T.max(T.bitwise_and(bits, integer(0x7F800000)), integer((127 - 6) << 23))
    power = T.reinterpret(number, temp(exponent + integer(_POWER), lanes, "int32"))
    magnitude = T.reinterpret(number, T.bitwise_and(bits, integer(0x7FFFFFFF)))
    rounded = temp(T.reinterpret(wide, temp(magnitude + power, lanes)), lanes, "int32")
    code = rounded + T.shift_right(rounded, integer(20))  # eight times the exponent
    sign = T.bitwise_and(T.shift_right(bits, integer(24)), integer(-128))
    return T.bitwise_or(sign, T.bitwise_and(code, integer(127)))


def _nearest_codes(codec: Codec, value, lanes: int):
    """The codes nearest to float32 values, which are codes already if they are packed: int32."""
    if not codec.is_integer:
        return temp(_nearest_float8(value, lanes), lanes, "int32")
    whole = value if codec.is_packed else rint(value, lanes)  # these are rounded for their sums
    return temp(T.cast(whole, vector_type("int32", lanes)), lanes, "int32")


def store_codes(pages: QuantizedPages, row: Sequence, column, lanes: int, values) -> None:
    """Store the codes nearest to float32 vectors, within the range of codes or just outside.

    Parameters
    ----------
    values : sequence of sequences of vectors of `lanes` lanes
        Vectors side by side from `column` on after each of `Codec.columns_apart`.
    """
    width = lanes * len(values[0])
    codes = [
        concatenate([_nearest_codes(pages.codec, value, lanes) for value in each], lanes, "int32")
        for each in values
    ]
    _store_bytes(pages, row, column, width, [T.cast(x, vector_type("int8", width)) for x in codes])


def store_packed_codes(pages: QuantizedPages, row: Sequence, column, values) -> None:
    """As `store_codes`, for `packing.VECTORS` vectors that one instruction narrows."""
    lanes = packing.VECTORS * packing.LANES
    codes = [
        packing.pack([_nearest_codes(pages.codec, value, packing.LANES) for value in each])
        for each in values
    ]
    _store_bytes(pages, row, column, lanes, codes)


def _store_bytes(pages: QuantizedPages, row: Sequence, column, lanes: int, codes) -> None:
    """Store codes, int8: `lanes` of them from `column` on after each of `columns_apart`."""
    codec, width = pages.codec, pages.spec.qk_head_dim
    if codec.is_packed:
        codes = [temp(x, lanes, "int8") for x in codes]
    columns = dict(zip(codec.columns_apart(width), codes, strict=True))
    for begin, plane in reversed(codec.planes_of(width)):
        if plane.has_neighbours:  # single bits, the highest: that of a code without its sign
            for first, code in columns.items():
                bits = T.reinterpret(f"uint8x{lanes // 8}", packing.not_negative(code, lanes))
                at = ramp(begin + (column + first) // 8, lanes // 8)
                T.buffer_store(pages.codes, bits, [*row, at])
            continue
        num_bytes = plane.num_bytes(width)
        for first in columns:
            if first < num_bytes:
                members = [columns[n] for n in range(first, width, num_bytes)]
                data = _joined(codec, plane, members, lanes)
                if codec.storage_dtype != "int8":
                    data = T.reinterpret(vector_type(codec.storage_dtype, lanes), data)
                at = ramp(begin + first + column, lanes)
                T.buffer_store(pages.codes, data, [*row, at])


def _joined(codec: Codec, plane: BitPlane, codes: list, lanes: int):
    """The bits that a plane has of some codes, in one byte: int8."""

    def integer(value: int):
        return broadcast(T.int8((value & 0xFF) - ((value & 0x80) << 1)), lanes)

    if plane.num_bits == 8:
        return codes[0]
    data = None
    for index, code in enumerate(codes):
        bits = T.shift_right(code, integer(plane.first_bit)) if plane.first_bit else code
        if index < len(codes) - 1:  # the shift to the left drops those of the last one
            bits = T.bitwise_and(bits, integer(plane.mask))
        if index > 0:
            bits = T.shift_left(bits, integer(index * plane.num_bits))
        data = bits if data is None else T.bitwise_or(data, bits)
    # Less the lowest code, a power of two: that changes one bit, the highest.
    flipped = -codec.lowest >> plane.first_bit & plane.mask
    if flipped:
        all_flipped = sum(flipped << index * plane.num_bits for index in range(len(codes)))
        data = T.bitwise_xor(data, integer(all_flipped))
    return data
