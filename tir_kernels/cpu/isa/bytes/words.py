# SPDX-License-Identifier: Apache-2.0
"""Dot products of words: two products of signed 16-bit numbers per int32 (AVX2).

LLVM makes one ``vpdpwssd`` of the multiplication and the addition where the CPU has it (AVX-VNNI).
"""

from __future__ import annotations

from collections.abc import Callable

from tvm.script import tirx as T

from .. import simd
from ..shuffles import next_power_of_two, reduce_each
from ..simd import F32, broadcast, constant, fused_multiply_add, load, store, temp
from .two_bytes import row_scale

INT32, LANES = "int32", 8

# linkonce_odr: several kernels of one module may bring the same helper.
LLVM_HELPERS = """
define linkonce_odr <8 x i32> @pagedkv_word_dot(<8 x i32> %sum, <8 x i32> %a, <8 x i32> %b) #0 {
  %x = bitcast <8 x i32> %a to <16 x i16>
  %y = bitcast <8 x i32> %b to <16 x i16>
  %products = call <8 x i32> @llvm.x86.avx2.pmadd.wd(<16 x i16> %x, <16 x i16> %y)
  %total = add <8 x i32> %sum, %products
  ret <8 x i32> %total
}
define linkonce_odr <8 x i32> @pagedkv_in_order(<8 x i32> %sum) #0 {
  %same = call <8 x i32> asm "", "=x,0"(<8 x i32> %sum)
  ret <8 x i32> %same
}
declare <8 x i32> @llvm.x86.avx2.pmadd.wd(<16 x i16>, <16 x i16>)
attributes #0 = { alwaysinline nounwind readnone }
"""
# Added to a small number, it leaves the nearest whole number in the lower word.
_ROUNDER = 1.5 * 2**23


def dot(total, a, b):
    """Return `total` plus the products of the words of two vectors of dwords."""
    return T.call_pure_extern("int32x8", "pagedkv_word_dot", total, a, b)


def in_order(total):
    """Return a sum as it is, one of as many long sums as registers hold.

    LLVM would cut such sums into several, which it adds up at the end, and spill some of them. The
    sum therefore passes through assembly code without any instruction.
    """
    return T.call_pure_extern("int32x8", "pagedkv_in_order", total)


def integer(value: int):
    """A constant in every lane."""
    return broadcast(T.int32(value), LANES)


def both_words(value: int):
    """A constant of 16 bits in both words of every lane."""
    words = (value & 0xFFFF) * 0x10001
    return integer(words - (1 << 32) if words >> 31 else words)


@T.meta_class
class RowWords:
    """Rows of numbers as signed words, each row with a scale of its own.

    Parameters
    ----------
    num_rows : int
    width : int
        Numbers of a row, a multiple of 16.

    Attributes
    ----------
    words : int32 ``[row, dword]``: two numbers each
    scale : float32 ``[row]``; NaN for a row in which some number is not finite
    """

    def __init__(self, num_rows: int, width: int):
        self.width = width
        self.words = T.alloc_buffer((num_rows, width // 2), INT32)
        self.scale = T.alloc_buffer((num_rows + LANES,), F32)  # behind them, vectors end

    def set_rows(self, first, count: int, source: Callable) -> None:
        """Take the numbers of some rows, at most as many as a vector has lanes.

        ``source(i, start)`` gives two float32 vectors of row ``first + i``, of the lower and the
        upper words of 16 numbers from `start` on. It is evaluated twice.
        """
        lanes, starts = next_power_of_two(count), range(0, self.width, 2 * LANES)
        largest = [self._largest([v for n in starts for v in source(i, n)]) for i in range(count)]
        bits = reduce_each(largest, LANES, simd.maximum, "uint32")
        scale, inverse = row_scale(temp(bits, lanes, "uint32"), lanes)
        store(self.scale, (first,), lanes, scale)
        factors = T.alloc_local((lanes,), F32)
        store(factors, (0,), lanes, inverse)
        for i in range(count):
            factor = temp(broadcast(factors[i], LANES), LANES)
            for start in starts:
                words = temp(_as_words(source(i, start), factor), LANES, INT32)
                store(self.words, (first + i, start // 2), LANES, words, INT32)

    def sums(self, first, count: int):
        """The sums of some rows as integers, at most as many as a vector has lanes."""
        totals = []
        for i in range(count):
            total = integer(0)
            for dword in range(0, self.width // 2, LANES):
                words = self.vector(first + i, dword)
                total = temp(dot(total, words, both_words(1)), LANES, INT32)
            totals.append(total)
        return reduce_each(totals, LANES, simd.add, INT32)

    @staticmethod
    def _largest(vectors: list):
        """The bits of the largest magnitude in each lane."""
        magnitude, largest = broadcast(T.uint32(0x7FFFFFFF), LANES), None
        for value in vectors:
            bits = T.bitwise_and(T.reinterpret("uint32x8", value), magnitude)
            largest = bits if largest is None else T.max(largest, bits)
            largest = temp(largest, LANES, "uint32")
        return largest

    def vector(self, row, dword):
        """The words of `LANES` dwords of a row."""
        return load(self.words, (row, dword), LANES, INT32)


def _as_words(values: list, factor):
    """Two vectors of numbers, times a factor, as the lower and the upper words of a vector."""
    low, high = (
        T.reinterpret(
            "int32x8", temp(fused_multiply_add(v, factor, constant(_ROUNDER, LANES), LANES), LANES)
        )
        for v in values
    )
    low = T.bitwise_and(low, integer(0xFFFF))
    return T.bitwise_or(low, T.shift_left(high, integer(16)))
