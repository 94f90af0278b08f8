# SPDX-License-Identifier: Apache-2.0
"""A pass for apache-tvm 0.26, whose BF16ComputeLegalize refuses to load vectors of bfloat16."""

from __future__ import annotations

from typing import Any

import tvm_ffi
from tvm import tirx


@tirx.transform.prim_func_pass(opt_level=0)
def widen_bfloat16_vectors(function: tirx.PrimFunc, _module: Any, _context: Any) -> tirx.PrimFunc:
    """Write casts of vectors from bfloat16 to float32 as shifts of their bits."""

    def widen(cast: tirx.Cast, mutator: Any) -> Any:
        kind, lanes = str(cast.value.ty.dtype).partition("x")[::2]
        if kind != "bfloat16" or not lanes or str(cast.ty.dtype) != f"float32x{lanes}":
            return mutator.default_mutate(cast)
        words = f"uint32x{lanes}"
        value = mutator.mutate(cast.value)
        bits = tirx.call_intrin(f"uint16x{lanes}", "tirx.reinterpret", value)
        by = tirx.Broadcast(tirx.const(16, "uint32"), int(lanes))
        shifted = tirx.call_intrin(words, "tirx.shift_left", tirx.Cast(words, bits), by)
        return tirx.call_intrin(f"float32x{lanes}", "tirx.reinterpret", shifted)

    return function.with_body(tvm_ffi.structural_mutate(function.body, (tirx.Cast, widen)))
