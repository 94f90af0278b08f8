# SPDX-License-Identifier: Apache-2.0
"""Common parts of a decoder's kernels: PrimFuncs over rows, and parallel loops."""

from __future__ import annotations

import functools
from collections.abc import Callable

from tvm import tirx
from tvm.script import tirx as T
from tvm.script.ir_builder import IRBuilder
from tvm.script.ir_builder import tirx as ir

from tir_kernels.cpu.isa.simd import require_half_target
from tir_kernels.spec import ITEMSIZE, VectorTarget

# Decorates builders of kernels, which layers of one shape share: building the TIR of products takes
# up to a quarter of a second.
built_once = functools.lru_cache(maxsize=256)


def rows_kernel(arguments: Callable, body: Callable, target: VectorTarget) -> tirx.PrimFunc:
    """A PrimFunc over n rows: ``arguments(n)`` lists (name, shape, dtype), `body` the rest.

    Raises
    ------
    ValueError
        For float16 on a target that cannot convert it.
    """
    with IRBuilder() as builder, ir.prim_func(s_tir=True, private=True):
        ir.func_name("kernel")
        ir.func_attr({"tirx.is_scheduled": True, "tirx.noalias": True})
        n = T.int64()
        described = arguments(n)
        dtypes = sorted({dtype for _, _, dtype in described})
        require_half_target(target, dtypes, f"arguments of {' and '.join(dtypes)}")
        handles = [ir.arg(name, T.handle()) for name, _, _ in described]
        buffers = [
            ir.match_buffer(handle, shape, dtype, align=ITEMSIZE.get(dtype, 4))
            for handle, (_, shape, dtype) in zip(handles, described, strict=True)
        ]
        with T.sblock("root"):  # Relax asks every function for one
            T.reads()
            T.writes()
            body(n, *buffers)
    return builder.get()


def parallel_if(condition, extent, body: Callable) -> None:
    """Emit a loop that runs ``body(i)`` for each i, in parallel if `condition` holds."""
    with T.If(condition):
        with T.Then():
            with T.parallel(extent) as i:
                body(i)
        with T.Else():
            with T.serial(extent) as i:
                body(i)
