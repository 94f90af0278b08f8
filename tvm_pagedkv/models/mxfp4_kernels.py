# SPDX-License-Identifier: Apache-2.0
"""Codes and scales of mxfp4 in kernels."""

from __future__ import annotations

from tvm.script import tirx as T

from tir_kernels.cpu.simd import F32, broadcast, constant, temp, vector_type

from .mxfp4 import DOUBLED, LARGEST

# The codes of 64 bytes as twice their numbers plus `LARGEST`, which `vpdpbusd` multiplies.
_TABLE = ", ".join(f"i8 {number + LARGEST}" for number in DOUBLED * 4)
LLVM_HELPER = f"""
define linkonce_odr <16 x i32> @pagedkv_mxfp4_codes(<16 x i32> %codes) #0 {{
  %x = bitcast <16 x i32> %codes to <64 x i8>
  %y = call <64 x i8> @llvm.x86.avx512.pshuf.b.512(<64 x i8> <{_TABLE}>, <64 x i8> %x)
  %r = bitcast <64 x i8> %y to <16 x i32>
  ret <16 x i32> %r
}}
declare <64 x i8> @llvm.x86.avx512.pshuf.b.512(<64 x i8>, <64 x i8>)
attributes #0 = {{ alwaysinline nounwind readnone }}
"""


def unsigned_codes(dwords):
    """Return dwords of codes, a byte each, as unsigned bytes; needs `LLVM_HELPER`."""
    return T.call_pure_extern("int32x16", "pagedkv_mxfp4_codes", dwords)


def float_codes(codes, lanes: int):
    """Return a vector of codes, a byte each, as float32: twice their numbers."""
    of_type = vector_type(F32, lanes)
    magnitude = T.cast(T.bitwise_and(codes, broadcast(T.uint8(7), lanes)), of_type)
    magnitude = temp(magnitude, lanes)
    negative = T.cast(T.shift_right(codes, broadcast(T.uint8(3), lanes)), of_type)
    twice = magnitude * constant(2.0, lanes) - constant(4.0, lanes)
    four_times = magnitude * constant(4.0, lanes) - constant(16.0, lanes)
    value = T.max(T.max(magnitude, twice), four_times)
    return value * (constant(1.0, lanes) - constant(2.0, lanes) * negative)


def float_scales(scales, lanes: int):
    """Return half of each power of two of a vector of scales, as float32."""
    wide = T.cast(scales, vector_type("uint32", lanes))
    bits = T.shift_left(wide, broadcast(T.uint32(23), lanes))
    return T.reinterpret(vector_type(F32, lanes), bits) * constant(0.5, lanes)
