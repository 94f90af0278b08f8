# SPDX-License-Identifier: Apache-2.0
"""Codes of quantized rows as vectors: to numbers and back; see `tir_kernels.codec`."""

from __future__ import annotations

import math
from collections.abc import Sequence

from tvm.script import tirx as T

from ...codec import Codec
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
    half, wide = pages.spec.qk_head_dim // 2, vector_type("int32", lanes)
    if isinstance(column, int):
        is_high = T.int32(4 * (column // half))
    else:
        is_high = T.cast(column >= half, "int32") * 4
    data = T.cast(pages.codes[(*row, ramp(column % half, lanes))], wide)
    low = T.bitwise_and(
        T.shift_right(data, broadcast(is_high, lanes)), broadcast(T.int32(15), lanes)
    )
    if not pages.codec.has_bit_plane:
        return low
    bits = T.bitwise_and(_load_bits(pages, row, column, lanes), broadcast(T.int32(16), lanes))
    return T.bitwise_or(low, bits)


def _load_bits(pages: QuantizedPages, row: Sequence, column, lanes: int):
    """The fifth bits of `lanes` columns, 16 at most, in bit 4 of an int32 each; others are garbage.

    Lanes get the byte or the word with all their bits, as often as it fits, and shift it.
    """
    first, wide = pages.spec.qk_head_dim // 2 + column // 8, vector_type("int32", lanes)
    if lanes <= 8:
        data, size = pages.codes[(*row, first)], 8
    else:
        data, size = T.reinterpret("uint16", pages.codes[(*row, ramp(first, 2))]), 16
    repeated = broadcast(temp(data, 1, f"uint{size}"), lanes * 32 // size)
    shifts = ramp(size - 4 + column % size, lanes)
    return T.shift_right(T.reinterpret(wide, repeated), shifts)


def load_unpacked(pages: QuantizedPages, row: Sequence, column: int, num_columns: int):
    """The codes of columns, less the lowest code, a byte each: int32, four columns a lane.

    Only of codecs with a bit plane. Within `packing.mask_scope`.
    """
    half = pages.spec.qk_head_dim // 2
    size = math.gcd(half, num_columns)  # columns of a half, side by side in memory
    parts = []
    for start in range(column, column + num_columns, size):
        data = pages.codes[(*row, ramp(start % half, size))]
        dwords, lanes = T.reinterpret(f"int32x{size // 4}", data), size // 4
        low = T.shift_right(dwords, broadcast(T.int32(4 * (start // half)), lanes))
        low = T.bitwise_and(low, broadcast(T.int32(0x0F0F0F0F), lanes))
        parts.append(temp(low, lanes, "int32"))
    low, lanes = concatenate(parts, size // 4, "int32"), num_columns // 4
    data = pages.codes[(*row, ramp(half + column // 8, num_columns // 8))]
    mask = T.reinterpret(f"uint{num_columns}", data)
    bits = T.reinterpret(f"int32x{lanes}", packing.select(mask, num_columns))
    return T.bitwise_or(low, T.bitwise_and(bits, broadcast(T.int32(0x10101010), lanes)))


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
        Vectors side by side from `column` on; of packed codes, also those half a row behind.
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
    """Store codes, int8; of packed ones those of two columns."""
    data, codec = codes[0], pages.codec
    if codec.is_packed:

        def integer(value: int):
            return broadcast(T.int8(value), lanes)

        low, high = codes = [temp(x, lanes, "int8") for x in codes]
        data = T.bitwise_or(T.bitwise_and(low, integer(15)), T.shift_left(high, integer(4)))
        if codec.has_bit_plane:  # 16 more leaves the low bits alone
            half = pages.spec.qk_head_dim // 2
            for first, each in zip((column, column + half), codes, strict=True):
                bits = T.reinterpret(f"uint8x{lanes // 8}", packing.not_negative(each, lanes))
                T.buffer_store(pages.codes, bits, [*row, ramp(half + first // 8, lanes // 8)])
        else:
            data = T.bitwise_xor(data, integer(0x88 - 256))  # plus 8, modulo 16
    if codec.storage_dtype != "int8":
        data = T.reinterpret(vector_type(codec.storage_dtype, lanes), data)
    T.buffer_store(pages.codes, data, [*row, ramp(column, lanes)])
