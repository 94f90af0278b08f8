# SPDX-License-Identifier: Apache-2.0
"""Generation of CUDA C++ from PrimFuncs: kernels, and launchers that check arguments."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping

import tvm
from tvm import tirx
from tvm.target import Target

from tir_kernels.releases import export_cuda_host

from .rewrite import rewrite
from .runtime import with_runtime

_KEEP_SOURCE = "TVM_COMPILE_FORCE_FALLBACK"

# A pointer argument of a kernel that is not an int32 array.
_DATA_POINTER = re.compile(r"(?<!\bint)\* __restrict__ ")
_LOOP = re.compile(r"^(?P<pragma> *#pragma unroll\n)?(?P<indent> *)for \(", re.MULTILINE)


def cuda_source(functions: Mapping[str, tirx.PrimFunc]) -> str:
    """Generate one translation unit with all functions.

    Parameters
    ----------
    functions : mapping
        Symbol -> PrimFunc.

    Returns
    -------
    str
        CUDA C++ that depends on tvm-ffi and the CUDA runtime, but not on TVM.
    """
    module = tvm.IRModule(
        {symbol: f.with_attr("global_symbol", symbol) for symbol, f in functions.items()}
    )
    target = Target(
        {
            "kind": "cuda",
            "arch": "sm_80",  # only the warp size of 32 depends on it
            "max_threads_per_block": 1024,
            "thread_warp_size": 32,
            "max_shared_memory_per_block": 232448,
        },
        host={"kind": "cuda_host"},
    )
    # nvcc unrolls loops, so that the source stays short.
    config = {"tirx.UnrollLoop": {"explicit_unroll": False}}
    before = os.environ.get(_KEEP_SOURCE)
    os.environ[_KEEP_SOURCE] = "1"  # or TVM compiles here if there is a driver
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
    """Drop ``__restrict__`` from every pointer to data that another kernel may write.

    A kernel may begin before the preceding one has ended, so its inputs may change while it runs.
    Through a restricted pointer that is only read, nvcc loads with ``ld.global.nc``, whose cache
    may hold stale data. Only int32 arrays keep the qualifier: the host has copied them before the
    step's kernels begin.
    """
    count = source.count("__restrict__") - len(re.findall(r"\bint\* __restrict__", source))
    return rewrite(source, _DATA_POINTER, "* ", count, "pointers to data")


def _unroll_only_where_told(source: str) -> str:
    """Disable unrolling of all other loops, which would cost registers."""

    def mark(match: re.Match) -> str:
        indent = match["indent"]
        return match[0] if match["pragma"] else f"{indent}#pragma unroll 1\n{indent}for ("

    return rewrite(source, _LOOP, mark, len(re.findall(r"\bfor\s*\(", source)), "loops")
