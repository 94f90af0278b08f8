# SPDX-License-Identifier: Apache-2.0
"""Alignment of the stack, where kernels keep vectors for which there is no register.

TVM aligns what it puts on the stack to 16 bytes, so LLVM leaves the stack as the caller aligned it,
and a vector of 64 bytes may cross cache lines. Whether it does depends on the caller: one build of
a kernel was up to 17 % slower than another with the same instructions.
"""

from __future__ import annotations

from tvm.script import tirx as T

# The variable becomes one of the function that the call is inlined into. linkonce_odr: several
# kernels of one module may bring the helper.
ALIGN_STACK = """
define linkonce_odr i32 @pagedkv_align_stack() #0 {
  %aligned = alloca i32, align 64
  store volatile i32 0, ptr %aligned, align 64
  ret i32 0
}
attributes #0 = { alwaysinline nounwind }
"""


def align_stack() -> None:
    """Align the stack of the function that this is emitted into, where `ALIGN_STACK` is known."""
    T.evaluate(T.call_extern("int32", "pagedkv_align_stack"))
