# SPDX-License-Identifier: Apache-2.0
"""Codes and scales of mxfp4 in kernels."""

from __future__ import annotations

from tvm.script import tirx as T

from tir_kernels.cpu.isa.simd import F32, broadcast, constant, temp, vector_type

from ...formats.mxfp4 import DOUBLED, LARGEST

# The instruction that looks up bytes, by the number of dwords of a vector.
_LOOK_UP = {16: "avx512.pshuf.b.512", 8: "avx2.pshuf.b"}


def llvm_helpers(lanes: int) -> tuple[str, ...]:
    """Return the LLVM functions that `unsigned_codes` calls."""
    # Codes as twice their numbers plus `LARGEST`, which products of unsigned codes multiply.
    table = ", ".join(f"i8 {number + LARGEST}" for number in DOUBLED * (lanes // 4))
    wide, narrow = f"<{lanes} x i32>", f"<{4 * lanes} x i8>"
    look_up = f"@llvm.x86.{_LOOK_UP[lanes]}"
    return (
        f"""
define linkonce_odr {wide} @pagedkv_mxfp4_codes({wide} %codes) #0 {{
  %x = bitcast {wide} %codes to {narrow}
  %y = call {narrow} {look_up}({narrow} <{table}>, {narrow} %x)
  %r = bitcast {narrow} %y to {wide}
  ret {wide} %r
}}
declare {narrow} {look_up}({narrow}, {narrow})
attributes #0 = {{ alwaysinline nounwind readnone }}
""",
    )


def unsigned_codes(dwords, lanes: int):
    """Return dwords of codes, a byte each, as unsigned bytes; needs `llvm_helpers`."""
    return T.call_pure_extern(vector_type("int32", lanes), "pagedkv_mxfp4_codes", dwords)


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
