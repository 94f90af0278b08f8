# SPDX-License-Identifier: Apache-2.0
"""Four vectors of int32 as one vector of bytes (AVX512BW).

One instruction that narrows a vector of int32 to bytes is two operations on the port of shuffles;
three instructions that saturate, and a permutation, narrow four vectors.
"""

from __future__ import annotations

from collections.abc import Sequence

from tvm.script import tirx as T

from ....spec import VectorTarget

VECTORS, LANES = 4, 16

# linkonce_odr: several kernels of one module may bring the same helper.
_LLVM_HELPERS = """
define linkonce_odr <16 x i32> @pagedkv_pack(<16 x i32> %a, <16 x i32> %b, <16 x i32> %c, <16 x i32> %d) #0 {
  %low = call <32 x i16> @llvm.x86.avx512.packssdw.512(<16 x i32> %a, <16 x i32> %b)
  %high = call <32 x i16> @llvm.x86.avx512.packssdw.512(<16 x i32> %c, <16 x i32> %d)
  %bytes = call <64 x i8> @llvm.x86.avx512.packsswb.512(<32 x i16> %low, <32 x i16> %high)
  %parts = bitcast <64 x i8> %bytes to <16 x i32>
  %all = shufflevector <16 x i32> %parts, <16 x i32> poison, <16 x i32> <i32 0, i32 4, i32 8, i32 12, i32 1, i32 5, i32 9, i32 13, i32 2, i32 6, i32 10, i32 14, i32 3, i32 7, i32 11, i32 15>
  ret <16 x i32> %all
}
declare <32 x i16> @llvm.x86.avx512.packssdw.512(<16 x i32>, <16 x i32>)
declare <64 x i8> @llvm.x86.avx512.packsswb.512(<32 x i16>, <32 x i16>)
attributes #0 = { alwaysinline nounwind readnone }
"""  # noqa: E501


def can_pack(target: VectorTarget) -> bool:
    """Whether a target has the instructions: CPUs with byte dot products do."""
    return target.has_vnni and target.lanes == LANES


def scope():
    """Open the scope in which `pack` may be emitted."""
    return T.attr(T.int32(0), "pragma_import_llvm", _LLVM_HELPERS)


def pack(vectors: Sequence):
    """Numbers of four vectors, which fit a signed byte, in order: int8x64."""
    packed = T.call_pure_extern("int32x16", "pagedkv_pack", *vectors)
    return T.reinterpret("int8x64", packed)
