# SPDX-License-Identifier: Apache-2.0
"""Dot products of bytes: four products of an unsigned and a signed byte per int32 (AVX512-VNNI).

Numbers are multiplied as signed integers of 16 bits in two bytes: ``n = high * 256 + low``, both
signed. The sums of the high bytes and those of the low ones are put together at the end. Sums wrap
around modulo 2**32, so only what comes out at the end has to fit.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from tvm.script import tirx as T

from . import simd
from .shuffles import next_power_of_two, reduce_each
from .simd import F32, Register, broadcast, constant, rint, shuffle, store, temp, vector_type

INT32, LANES = "int32", 16
MOST = 32639.0  # 127 * 256 + 127: the largest number of two signed bytes

# linkonce_odr: several kernels of one module may bring the same helper.
LLVM_HELPERS = """
define linkonce_odr <16 x i32> @pagedkv_byte_dot(<16 x i32> %sum, <16 x i32> %u, <16 x i32> %s) #0 {
  %x = bitcast <16 x i32> %u to <64 x i8>
  %y = bitcast <16 x i32> %s to <64 x i8>
  %r = call <16 x i32> @llvm.x86.avx512.vpdpbusd.512(<16 x i32> %sum, <64 x i8> %x, <64 x i8> %y)
  ret <16 x i32> %r
}
declare <16 x i32> @llvm.x86.avx512.vpdpbusd.512(<16 x i32>, <64 x i8>, <64 x i8>)
attributes #0 = { alwaysinline nounwind readnone }
"""


def scope():
    """Where `add_dots` may be emitted."""
    return T.attr(T.int32(0), "pragma_import_llvm", LLVM_HELPERS)


def add_dots(total: Register, unsigned, signed) -> None:
    """Add the products of the bytes of `unsigned` and of a scalar dword of signed bytes."""
    add_vector_dots(total, unsigned, broadcast(signed, LANES))


def add_vector_dots(total: Register, unsigned, signed) -> None:
    """Add the products of the bytes of two vectors."""
    arguments = ("pagedkv_byte_dot", total.get(), unsigned, signed)
    total.set(T.call_pure_extern("int32x16", *arguments))


def integer(value: int):
    """A constant in every lane."""
    return broadcast(T.int32(value), LANES)


class TwoBytes:
    """Rows of numbers as two signed bytes: ``[row, high or low, dword of four numbers]``.

    Parameters
    ----------
    num_rows : int
    width : int
        Numbers of a row: a multiple of 16.

    Attributes
    ----------
    scale : float32, of each row
    sums : int32, of each row: the sum of its numbers
    """

    def __init__(self, num_rows: int, width: int):
        self.width, padded = width, num_rows + LANES  # the last ones are stored by the vector
        self.dwords = T.alloc_buffer((num_rows, 2, width // 4), INT32)
        self.scale = T.alloc_buffer((padded,), F32)
        self.inverse = T.alloc_buffer((padded,), F32)
        self.sums = T.alloc_buffer((padded,), INT32)

    def set_rows(self, first, count: int, source: Callable) -> None:
        """Take the numbers ``source(i, start)`` of `count` rows from `first` on, 16 at most.

        `source` gives float32 vectors of 16 numbers, and is evaluated twice. A row of which some
        are NaN or infinite has the scale NaN.
        """
        starts, lanes = range(0, self.width, LANES), next_power_of_two(count)
        magnitude = broadcast(T.uint32(0x7FFFFFFF), LANES)
        largest = []
        for i in range(count):
            found = None
            for start in starts:
                bits = T.bitwise_and(T.reinterpret("uint32x16", source(i, start)), magnitude)
                found = bits if found is None else T.max(found, bits)
            largest.append(temp(found, LANES, "uint32"))
        bits = temp(reduce_each(largest, LANES, simd.maximum, "uint32"), lanes, "uint32")
        scale, inverse = _scale(bits, lanes)
        store(self.scale, (first,), lanes, scale)
        store(self.inverse, (first,), lanes, inverse)
        sums = []
        for i in range(count):
            factor = temp(broadcast(self.inverse[first + i], LANES), LANES)
            total = None
            for start in starts:
                number = rint(temp(source(i, start) * factor, LANES), LANES)
                number = temp(T.cast(number, "int32x16"), LANES, INT32)
                total = number if total is None else temp(total + number, LANES, INT32)
                high = T.shift_right(number + integer(128), integer(8))
                # The low byte of a number is its low part, modulo 256.
                for n, part in enumerate((high, number)):
                    dwords = T.reinterpret("int32x4", T.cast(part, "int8x16"))
                    store(self.dwords, (first + i, n, start // 4), 4, dwords, INT32)
            sums.append(total)
        store(self.sums, (first,), lanes, reduce_each(sums, LANES, simd.add, INT32), INT32)


def _scale(bits, lanes: int):
    """Scales of rows and their inverses, by the bits of the largest magnitudes."""
    number = vector_type(F32, lanes)
    is_finite = bits < broadcast(T.uint32(0x7F800000), lanes)
    scale = temp(T.reinterpret(number, bits) * constant(1 / MOST, lanes), lanes)
    is_known = T.And(is_finite, scale >= constant(2.0**-126, lanes))
    nan = T.reinterpret(number, broadcast(T.uint32(0x7FC00000), lanes))
    zero, one = constant(0.0, lanes), constant(1.0, lanes)
    inverse = T.Select(is_known, one / T.Select(is_known, scale, one), zero)
    scale = T.Select(is_known, scale, T.Select(is_finite, zero, nan))
    return temp(scale, lanes), temp(inverse, lanes)


def put_together(high, low):
    """The sums of products with numbers of two bytes, from those with either byte."""
    return T.shift_left(high, integer(8)) + low


def _unpack(a, b, width: int, half: int, dtype: str, lanes: int):
    """Interleave elements of `width` lanes of two vectors, of either half of each 128 bits."""
    per_part = lanes // 4  # 128 bits
    order = []
    for part in range(0, lanes, per_part):
        first = part + half * per_part // 2
        for i in range(first, first + per_part // 2, width):
            order += [*range(i, i + width), *range(lanes + i, lanes + i + width)]
    return temp(shuffle([a, b], order), lanes, dtype)


def _unpack_quad(rows: Sequence, dtype: str, lanes: int) -> list:
    """Four vectors of four rows: of each 128 bits, elements side by side that were in columns."""
    a, b, c, d = rows
    return [
        _unpack(*pair, 2, half, dtype, lanes)
        for first in range(2)
        for pair in [[_unpack(x, y, 1, first, dtype, lanes) for x, y in ((a, b), (c, d))]]
        for half in range(2)
    ]


def _transpose_parts(vectors: Sequence) -> list:
    """Transpose 4 vectors of int32 as a 4 x 4 block of their 128-bit parts."""
    low, high = [*range(0, 8), *range(16, 24)], [*range(8, 16), *range(24, 32)]
    even, odd = (
        [i + part * 8 + first for part in (0, 1, 2, 3) for i in range(4)] for first in (0, 4)
    )
    a, b, c, d = vectors
    halves = [
        [temp(shuffle(pair, order), LANES, INT32) for pair in ((a, b), (c, d))]
        for order in (low, high)
    ]
    return [temp(shuffle(half, order), LANES, INT32) for half in halves for order in (even, odd)]


def transpose_dwords(rows: Sequence) -> list:
    """Transpose 16 vectors of 16 dwords."""
    rows = [temp(row, LANES, INT32) for row in rows]
    quads = [_unpack_quad(rows[first : first + 4], INT32, LANES) for first in range(0, 16, 4)]
    # Vector e of a quad has, in part p, dword 4 * p + e of its four rows.
    columns = [_transpose_parts([quad[e] for quad in quads]) for e in range(4)]
    return [columns[e][p] for p in range(4) for e in range(4)]


def interleave_bytes(rows: Sequence) -> list:
    """Four vectors of 64 bytes as four vectors of 16 dwords: of the same byte of each row."""
    rows = [temp(T.reinterpret("uint8x64", row), 64, "uint8") for row in rows]
    quads = [T.reinterpret("int32x16", v) for v in _unpack_quad(rows, "uint8", 64)]
    return _transpose_parts([temp(v, LANES, INT32) for v in quads])
