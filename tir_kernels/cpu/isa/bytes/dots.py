# SPDX-License-Identifier: Apache-2.0
"""Dot products of bytes: four products of codes and of bytes of numbers per int32 of a vector.

Rows of Q, or of weights, are numbers of two bytes (`two_bytes`), so there are two sums for each, of
products with the high and with the low bytes. `UnsignedDots` (AVX-512), `SignedDots` (AArch64),
`MatrixDots` (AArch64 with matrices of bytes) and `BytePairs` (AVX2, codes of 4 bits) have the same
methods.
"""

from __future__ import annotations

from tvm.script import tirx as T

from ....spec import VectorTarget
from ..shuffles import INT32
from ..simd import broadcast, load, shuffle, store, temp
from .two_bytes import MatrixBytes, TwoBytes, VectorBytes, put_together
from .words import LANES, both_words, dot, in_order, integer

# linkonce_odr: several kernels of one module may bring the same helper.
VNNI_HELPERS = """
define linkonce_odr <16 x i32> @pagedkv_byte_dot(<16 x i32> %sum, <16 x i32> %u, <16 x i32> %s) #0 {
  %x = bitcast <16 x i32> %u to <64 x i8>
  %y = bitcast <16 x i32> %s to <64 x i8>
  %r = call <16 x i32> @llvm.x86.avx512.vpdpbusd.512(<16 x i32> %sum, <64 x i8> %x, <64 x i8> %y)
  ret <16 x i32> %r
}
declare <16 x i32> @llvm.x86.avx512.vpdpbusd.512(<16 x i32>, <64 x i8>, <64 x i8>)
attributes #0 = { alwaysinline nounwind readnone }
"""
_BYTE_PAIRS = """
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


def _neon_helper(instruction: str) -> str:
    """Return an LLVM function that adds products of the bytes of two vectors of dwords."""
    intrinsic = f"@llvm.aarch64.neon.{instruction}.v4i32.v16i8"
    return f"""
define linkonce_odr <4 x i32> @pagedkv_{instruction}(<4 x i32> %s, <4 x i32> %a, <4 x i32> %b) #0 {{
  %x = bitcast <4 x i32> %a to <16 x i8>
  %y = bitcast <4 x i32> %b to <16 x i8>
  %r = call <4 x i32> {intrinsic}(<4 x i32> %s, <16 x i8> %x, <16 x i8> %y)
  ret <4 x i32> %r
}}
declare <4 x i32> {intrinsic}(<4 x i32>, <16 x i8>, <16 x i8>)
attributes #0 = {{ alwaysinline nounwind readnone }}
"""


class ByteDots:
    """The steps of products with codes, whose sums are of high and of low bytes of numbers.

    A step multiplies `depth` dwords of a row of numbers with as many vectors of codes, in `calls`
    calls of `add`.

    Attributes
    ----------
    lanes : int
        int32 lanes of a vector.
    llvm_helpers : tuple of str
        LLVM functions that are called.
    is_signed : bool
        Whether codes are signed bytes. Unsigned ones are those of "int8" plus 128, and the codes of
        "int4" in the upper bits of a byte, which stay there.
    max_turns : int
        Sums of int32 that a long sum may be cut into, because a dot product has a latency.
    two_bytes : type
        `TwoBytes` in the order that steps read.
    left_lanes : int
        int32 lanes of a left operand.
    """

    lanes: int
    llvm_helpers: tuple[str, ...]
    is_signed = True
    max_turns = 4
    depth, calls, left_lanes = 1, 2, 1
    two_bytes = TwoBytes

    def dot(self, total, codes, dword):
        """Return `total` plus the products of the bytes of `codes` and of a scalar dword."""
        raise NotImplementedError

    def put_together(self, high, low):
        """The sums of products with numbers of two bytes, from those with either byte."""
        return put_together(high, low, self.lanes)

    def of_four(self, dwords, at, row: int):
        """Dword of a row, of the four rows whose dwords begin at index `at` of a buffer."""
        *outer, last = at
        return dwords[(*outer, last + row)]

    def left(self, numbers: TwoBytes, of_set, row: int, dword, call: int):
        """The left operand of a call: the high bytes of a dword of a row, or the low ones."""
        return numbers.dword(of_set, row, call, dword)

    def right(self, codes: list):
        """The right operand of a step, from `depth` vectors of codes."""
        return codes[0]

    def add(self, sums, at: int, call: int, left, right) -> None:
        """Add products to vectors `at` and ``at + 1`` of `sums`."""
        total = load(sums, (at + call, 0), self.lanes, INT32)
        store(sums, (at + call, 0), self.lanes, self.dot(total, right, left), INT32)

    def separate(self, sums) -> None:
        """Bring the sums of high and of low bytes apart, after the last step: they are."""


class UnsignedDots(ByteDots):
    """Byte dot products of unsigned codes (``vpdpbusd``, AVX512-VNNI)."""

    lanes = 16
    is_signed = False

    @property
    def llvm_helpers(self) -> tuple[str, ...]:
        """The LLVM functions."""
        return (VNNI_HELPERS,)

    def dot(self, total, codes, dword):
        arguments = ("pagedkv_byte_dot", total, codes, broadcast(dword, self.lanes))
        return T.call_pure_extern("int32x16", *arguments)


class SignedDots(ByteDots):
    """Byte dot products of signed codes (``sdot``, FEAT_DotProd)."""

    lanes = 4
    llvm_helpers = (_neon_helper("sdot"),)

    def dot(self, total, codes, dword):
        arguments = ("pagedkv_sdot", total, codes, broadcast(dword, self.lanes))
        return T.call_pure_extern("int32x4", *arguments)

    def of_four(self, dwords, at, row: int):
        """As of `ByteDots`: a lane of a vector with all four, which the instruction takes."""
        *outer, last = at
        return shuffle([dwords[(*outer, T.ramp(last, 1, 4))]], [row])


class MatrixDots(SignedDots):
    """Products of matrices of 2 x 8 and 8 x 2 bytes (``smmla``, FEAT_I8MM).

    The two rows of a matrix on the left are the high and the low bytes of eight numbers; those on
    the right are two lanes of two vectors of codes. So a vector of sums has those of high bytes for
    two lanes, then those of low bytes.
    """

    llvm_helpers = (*SignedDots.llvm_helpers, _neon_helper("smmla"))
    depth, calls, left_lanes = 2, 1, 4
    two_bytes = MatrixBytes

    _HALVES = [0, 4, 1, 5], [2, 6, 3, 7]  # of the lanes of two vectors, lane by lane
    _PAIRS = [0, 1, 4, 5], [2, 3, 6, 7]  # the first two lanes of two vectors, and the last

    def left(self, numbers: MatrixBytes, of_set, row: int, dword, call: int):
        """The bytes of eight numbers."""
        return numbers.matrix(of_set, row, dword)

    def right(self, codes: list):
        """Matrices of the first two lanes of two vectors, and of the last two."""
        return [temp(shuffle(codes, order), 4, INT32) for order in self._HALVES]

    def add(self, sums, at: int, call: int, left, right) -> None:
        """Add the products of four lanes."""
        for n, matrix in enumerate(right):
            total = load(sums, (at + n, 0), 4, INT32)
            total = T.call_pure_extern("int32x4", "pagedkv_smmla", total, left, matrix)
            store(sums, (at + n, 0), 4, total, INT32)

    def separate(self, sums) -> None:
        """Bring the sums of high and of low bytes apart."""
        for i in range(0, int(sums.shape[0]), 2):
            pair = [temp(load(sums, (i + n, 0), 4, INT32), 4, INT32) for n in range(2)]
            for n, order in enumerate(self._PAIRS):
                store(sums, (i + n, 0), 4, shuffle(pair, order), INT32)


class BytePairs(ByteDots):
    """Byte dot products of codes of 4 bits (``vpmaddubsw``, AVX2).

    A sum is two words, which `put_together` adds up. The dot products of 32 columns, which share a
    scale, fit it: ``8 * 2 * 15 * 128 < 2**15``. Codes are brought into the lower bits of a byte.
    """

    lanes = LANES
    max_turns = 1  # sums are words, and an addition has a latency of one cycle
    llvm_helpers = (_BYTE_PAIRS,)
    left_lanes = LANES
    two_bytes = VectorBytes

    def dot(self, total, codes, dwords):
        """Add the products of the bytes of `codes` and of a vector of dwords to two words."""
        arguments = ("pagedkv_byte_pairs", total, codes, dwords)
        return in_order(T.call_pure_extern("int32x8", *arguments))

    def put_together(self, high, low):
        total = temp(dot(integer(0), low, both_words(1)), LANES, INT32)
        return dot(total, high, both_words(256))


def byte_dots(target: VectorTarget) -> ByteDots | None:
    """Return the byte dot products of a target, or None if it has none."""
    if target.has_vnni:
        return UnsignedDots()
    if target.has_smmla:
        return MatrixDots()
    return SignedDots() if target.has_sdot else None
