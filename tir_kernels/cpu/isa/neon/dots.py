# SPDX-License-Identifier: Apache-2.0
"""Products of signed bytes with NEON: dot products, and those of matrices."""

from __future__ import annotations

from tvm.script import tirx as T

from ..bytes.two_bytes import put_together
from ..simd import broadcast, shuffle


def _helper(instruction: str) -> str:
    """Return an LLVM function that adds products of the bytes of two vectors of dwords."""
    intrinsic = f"@llvm.aarch64.neon.{instruction}.v4i32.v16i8"
    # linkonce_odr: several kernels of one module may bring the same helper.
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


class SignedDots:
    """Byte dot products of signed codes (``sdot``, FEAT_DotProd), as `vnni.UnsignedDots`."""

    lanes = 4
    is_signed = True
    max_turns = 4
    llvm_helpers = (_helper("sdot"),)

    def dot(self, total, codes, dword):
        """Return `total` plus the products of the bytes of `codes` and of a scalar dword."""
        arguments = ("pagedkv_sdot", total, codes, broadcast(dword, self.lanes))
        return T.call_pure_extern("int32x4", *arguments)

    def put_together(self, high, low):
        """The sums of products with numbers of two bytes, from those with either byte."""
        return put_together(high, low, self.lanes)

    def of_four(self, dwords, at, row: int):
        """Dword of a row, of the four rows whose dwords begin at index `at` of a buffer.

        It is a lane of a vector with all four, which the instruction takes as it is.
        """
        *outer, last = at
        return shuffle([dwords[(*outer, T.ramp(last, 1, 4))]], [row])


class MatrixDots(SignedDots):
    """`SignedDots` with products of matrices of bytes (``smmla``, FEAT_I8MM)."""

    llvm_helpers = (*SignedDots.llvm_helpers, _helper("smmla"))

    def add_matrices(self, sums, left, right):
        """Add the product of two rows and two columns of eight bytes to 2 x 2 sums."""
        return T.call_pure_extern("int32x4", "pagedkv_smmla", sums, left, right)
