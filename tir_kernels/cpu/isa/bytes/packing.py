# SPDX-License-Identifier: Apache-2.0
"""Vectors of int32 narrowed to bytes, and bytes to bits.

One instruction that narrows a vector of int32 to bytes is two operations on the port of shuffles;
three instructions of AVX512BW that saturate, and a permutation, narrow four vectors (`pack`).

A mask has a bit for each lane of a vector of bytes (`not_negative`, `select`): LLVM has an
instruction or two for it on every target, and TIR has no expression for it.
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
MASK_LANES = 16  # fewest bytes of a vector that has a mask

MASK_HELPERS = (
    "".join(
        f"""
define linkonce_odr i{lanes} @pagedkv_not_negative_{lanes}(<{lanes} x i8> %x) #0 {{
  %lanes = icmp sge <{lanes} x i8> %x, zeroinitializer
  %bits = bitcast <{lanes} x i1> %lanes to i{lanes}
  ret i{lanes} %bits
}}
define linkonce_odr <{lanes} x i8> @pagedkv_select_{lanes}(i{lanes} %bits) #0 {{
  %lanes = bitcast i{lanes} %bits to <{lanes} x i1>
  %bytes = sext <{lanes} x i1> %lanes to <{lanes} x i8>
  ret <{lanes} x i8> %bytes
}}
"""
        for lanes in (16, 32, 64)
    )
    + "attributes #0 = { alwaysinline nounwind readnone }\n"
)


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


def mask_scope():
    """Return the scope in which `not_negative` and `select` may be emitted."""
    return T.attr(T.int32(0), "pragma_import_llvm", MASK_HELPERS)


def not_negative(codes, lanes: int):
    """Bit i of an integer of `lanes` bits: whether lane i of a vector of int8 is not negative."""
    return T.call_pure_extern(f"uint{lanes}", f"pagedkv_not_negative_{lanes}", codes)


def select(bits, lanes: int):
    """A vector of int8 with -1 where the bit of a lane is set in an integer, and 0 elsewhere."""
    return T.call_pure_extern(f"int8x{lanes}", f"pagedkv_select_{lanes}", bits)
