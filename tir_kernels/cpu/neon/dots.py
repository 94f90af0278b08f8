# SPDX-License-Identifier: Apache-2.0
"""Dot products of bytes with NEON (FEAT_DotProd): four products of signed bytes per int32."""

from __future__ import annotations

from tvm.script import tirx as T

from ..simd import broadcast, shuffle

# linkonce_odr: several kernels of one module may bring the same helper.
_LLVM_HELPERS = """
define linkonce_odr <4 x i32> @pagedkv_sdot(<4 x i32> %s, <4 x i32> %a, <4 x i32> %b) #0 {
  %x = bitcast <4 x i32> %a to <16 x i8>
  %y = bitcast <4 x i32> %b to <16 x i8>
  %r = call <4 x i32> @llvm.aarch64.neon.sdot.v4i32.v16i8(<4 x i32> %s, <16 x i8> %x, <16 x i8> %y)
  ret <4 x i32> %r
}
declare <4 x i32> @llvm.aarch64.neon.sdot.v4i32.v16i8(<4 x i32>, <16 x i8>, <16 x i8>)
attributes #0 = { alwaysinline nounwind readnone }
"""


class SignedDots:
    """Byte dot products of signed codes (``sdot``); `vnni.UnsignedDots` has the attributes."""

    lanes = 4
    is_signed = True
    llvm_helpers = (_LLVM_HELPERS,)

    def dot(self, total, codes, dword):
        """Return `total` plus the products of the bytes of `codes` and of a scalar dword."""
        arguments = ("pagedkv_sdot", total, codes, broadcast(dword, self.lanes))
        return T.call_pure_extern("int32x4", *arguments)

    def of_four(self, dwords, at, row: int):
        """Dword of a row, of the four rows whose dwords begin at index `at` of a buffer.

        It is a lane of a vector with all four, which the instruction takes as it is.
        """
        *outer, last = at
        return shuffle([dwords[(*outer, T.ramp(last, 1, 4))]], [row])
