# SPDX-License-Identifier: Apache-2.0
"""Dot products of bytes with AVX512-VNNI: four products of an unsigned and a signed byte."""

from __future__ import annotations

from tvm.script import tirx as T

from ..simd import broadcast
from .two_bytes import put_together

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


class UnsignedDots:
    """Byte dot products of unsigned codes (``vpdpbusd``).

    Attributes
    ----------
    lanes : int
        int32 lanes of a vector.
    llvm_helpers : tuple of str
        LLVM functions that `dot` calls.
    is_signed : bool
        Whether codes are signed bytes. Unsigned ones are those of "int8" plus 128, and the codes of
        "int4" in the upper bits of a byte, which stay there.
    max_turns : int
        Sums of int32 that a long sum may be cut into, because a dot product has a latency.
    """

    lanes = 16
    is_signed = False
    max_turns = 4

    @property
    def llvm_helpers(self) -> tuple[str, ...]:
        """The LLVM functions."""
        return (LLVM_HELPERS,)

    def dot(self, total, codes, dword):
        """Return `total` plus the products of the bytes of `codes` and of a scalar dword."""
        arguments = ("pagedkv_byte_dot", total, codes, broadcast(dword, self.lanes))
        return T.call_pure_extern("int32x16", *arguments)

    def put_together(self, high, low):
        """The sums of products with numbers of two bytes, from those with either byte."""
        return put_together(high, low, self.lanes)

    def of_four(self, dwords, at, row: int):
        """Dword of a row, of the four rows whose dwords begin at index `at` of a buffer."""
        *outer, last = at
        return dwords[(*outer, last + row)]
