# SPDX-License-Identifier: Apache-2.0
"""From PrimFuncs for GPUs to CUDA C++: kernels and the launchers that check their arguments."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping

import tvm
from tvm import tirx
from tvm.backend.cuda import export_cuda_host
from tvm.target import Target

from .runtime import with_runtime

_KEEP_SOURCE = "TVM_COMPILE_FORCE_FALLBACK"

# A pointer argument of a kernel, other than an int32 array.
_DATA_POINTER = re.compile(r"(?<!\bint)\* __restrict__ (?=\w+_ptr\b)")
_LOOP = re.compile(r"^(?P<pragma> *#pragma unroll\n)?(?P<indent> *)for \(", re.MULTILINE)


def cuda_source(functions: Mapping[str, tirx.PrimFunc]) -> str:
    """One translation unit with all functions.

    Parameters
    ----------
    functions : mapping
        Symbol -> PrimFunc.

    Returns
    -------
    str
        It needs tvm-ffi and the CUDA runtime, and nothing of TVM besides.
    """
    module = tvm.IRModule(
        {symbol: f.with_attr("global_symbol", symbol) for symbol, f in functions.items()}
    )
    target = Target(
        {
            "kind": "cuda",
            "arch": "sm_80",  # of what is generated only warps of 32 threads depend on it
            "max_threads_per_block": 1024,
            "thread_warp_size": 32,
            "max_shared_memory_per_block": 232448,
        },
        host={"kind": "cuda_host"},
    )
    # Loops are left for the compiler to unroll: the text stays short.
    config = {"tirx.UnrollLoop": {"explicit_unroll": False}}
    before = os.environ.get(_KEEP_SOURCE)
    os.environ[_KEEP_SOURCE] = "1"  # or a machine that has a driver compiles the kernels right here
    try:
        with target, tvm.transform.PassContext(config=config):
            built = tvm.compile(module, target=target, tir_pipeline="tirx")
        source = _unroll_only_where_told(export_cuda_host(built.mod))
        return with_runtime(_load_data_coherently(source))
    finally:
        if before is None:
            del os.environ[_KEEP_SOURCE]
        else:
            os.environ[_KEEP_SOURCE] = before


def _load_data_coherently(source: str) -> str:
    """Drop ``__restrict__`` from every pointer that another kernel may write through.

    A kernel may begin before the one before it has ended, so its arguments may change while it is
    there. Through a restricted pointer that a kernel only reads, the compiler loads with
    ``ld.global.nc``, whose cache may hold what was there before. Only the int32 arrays keep the
    qualifier: the host copies them before the step, and no kernel writes them.
    """
    return _DATA_POINTER.sub("* ", source)


def _unroll_only_where_told(source: str) -> str:
    """Keep the compiler from unrolling other loops, which takes registers from those that count."""

    def mark(match: re.Match) -> str:
        indent = match["indent"]
        return match[0] if match["pragma"] else f"{indent}#pragma unroll 1\n{indent}for ("

    return _LOOP.sub(mark, source)
