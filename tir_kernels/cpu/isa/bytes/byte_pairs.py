# SPDX-License-Identifier: Apache-2.0
"""Products of bytes with AVX2: sums of two products of an unsigned and a signed byte."""

from __future__ import annotations

from tvm.script import tirx as T

from ....script import inline
from ..simd import broadcast, load, store, temp
from .two_bytes import TwoBytes
from .words import INT32, LANES, both_words, dot, in_order, integer

# linkonce_odr: several kernels of one module may bring the same helper.
LLVM_HELPERS = """
define linkonce_odr <8 x i32> @pagedkv_byte_pairs(<8 x i32> %sum, <8 x i32> %u, <8 x i32> %s) #0 {
  %x = bitcast <8 x i32> %u to <32 x i8>
  %y = bitcast <8 x i32> %s to <32 x i8>
  %before = bitcast <8 x i32> %sum to <16 x i16>
  %products = call <16 x i16> @llvm.x86.avx2.pmadd.ub.sw(<32 x i8> %x, <32 x i8> %y)
  %total = add <16 x i16> %before, %products
  %r = bitcast <16 x i16> %total to <8 x i32>
  ret <8 x i32> %r
}
declare <16 x i16> @llvm.x86.avx2.pmadd.ub.sw(<32 x i8>, <32 x i8>)
attributes #0 = { alwaysinline nounwind readnone }
"""


class BytePairs:
    """Byte dot products of codes of 4 bits (``vpmaddubsw``), as `vnni.UnsignedDots`.

    A sum is two words, which `put_together` adds up. The dot products of 32 columns, which share a
    scale, fit it: ``8 * 2 * 15 * 128 < 2**15``.
    """

    lanes = LANES
    is_signed = True  # codes of 4 bits are brought into the lower bits of a byte
    max_turns = 1  # sums are words, and an addition has a latency of one cycle
    llvm_helpers = (LLVM_HELPERS,)

    def dot(self, total, codes, dwords):
        """Add the products of the bytes of `codes` and of a vector of dwords to two words."""
        arguments = ("pagedkv_byte_pairs", total, codes, dwords)
        return in_order(T.call_pure_extern("int32x8", *arguments))

    def put_together(self, high, low):
        """The sums of products with numbers of two bytes, from those with either byte."""
        total = temp(dot(integer(0), low, both_words(1)), LANES, INT32)
        return dot(total, high, both_words(256))

    def of_four(self, dwords, at, row: int):
        """Dword of a row, of the four rows whose dwords begin at index `at` of a buffer."""
        *outer, last = at
        return dwords[(*outer, last + row)]


@T.meta_class
class VectorBytes(TwoBytes):
    """`TwoBytes` whose dwords fill vectors: the instruction takes these as operands in memory.

    Broadcasts would be a quarter of the instructions otherwise, and take registers.
    """

    def __init__(
        self, dots, num_sets: int, rows: int, width: int, zero: int, *, num_segments: int = 1
    ):
        super().__init__(dots, num_sets, rows, width, zero, num_segments=num_segments)
        self.num_dwords = width // 4
        shape = (num_sets, rows, self.num_dwords, 2, LANES)
        self.vectors = T.alloc_buffer(shape, INT32)

    @inline
    def set_rows(self, of_set, source):
        """Take the numbers ``source(row, start)`` of the rows of a set."""
        TwoBytes.set_rows(self, of_set, source)
        for i in range(self.num_dwords):
            self._fill_vectors(of_set, i)

    def _fill_vectors(self, of_set, i) -> None:
        for row in range(self.rows):
            for is_low in range(2):
                value = broadcast(TwoBytes.dword(self, of_set, row, is_low, i), LANES)
                store(self.vectors, (of_set, row, i, is_low, 0), LANES, value, INT32)

    def dword(self, of_set, row: int, is_low: int, dword):
        """Four bytes of a row of a set, in each lane."""
        return load(self.vectors, (of_set, row, dword, is_low, 0), LANES, INT32)
