# SPDX-License-Identifier: Apache-2.0
"""A bit for each lane of a vector of bytes, as an integer: `movmsk` and its like, and back.

LLVM has an instruction or two for it on every target, and TIR has no expression for it.
"""

from __future__ import annotations

from tvm.script import tirx as T

LANES = 16  # fewest bytes of a vector

# linkonce_odr: several kernels of one module may bring the same helper.
LLVM_HELPERS = (
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


def scope():
    """Return the scope in which `not_negative` and `select` may be emitted."""
    return T.attr(T.int32(0), "pragma_import_llvm", LLVM_HELPERS)


def not_negative(codes, lanes: int):
    """Bit i of an integer of `lanes` bits: whether lane i of a vector of int8 is not negative."""
    return T.call_pure_extern(f"uint{lanes}", f"pagedkv_not_negative_{lanes}", codes)


def select(bits, lanes: int):
    """A vector of int8 with -1 where the bit of a lane is set in an integer, and 0 elsewhere."""
    return T.call_pure_extern(f"int8x{lanes}", f"pagedkv_select_{lanes}", bits)
