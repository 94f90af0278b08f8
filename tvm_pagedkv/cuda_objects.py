# SPDX-License-Identifier: Apache-2.0
"""Kernels for GPUs as an object file, to be linked to a model."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import tvm_ffi
from tvm import tirx
from tvm.target import Target

from .cuda_build import SOURCES
from .cuda_library import check_archs, compile_object, compiler_version
from .cuda_source import cuda_source
from .disk_cache import code_versions, sealed_file


class CudaKernelObjects:
    """One object file with all kernels of a model, compiled or found on the disk.

    Parameters
    ----------
    functions : mapping
        Symbol -> PrimFunc.
    target : tvm.target.Target
        Of kind "cuda"; its `arch` says what for, such as "sm_90".

    Raises
    ------
    ValueError
        For an architecture that has no kernels.
    RuntimeError
        Without nvcc.
    """

    def __init__(self, functions: Mapping[str, tirx.PrimFunc], target: Target):
        arch = arch_of(target)

        def build(path: Path) -> None:
            compile_object(cuda_source(functions), path, [arch])

        content = [f"{symbol} {tvm_ffi.structural_hash(f):x}" for symbol, f in functions.items()]
        versions = code_versions(*SOURCES, Path(__file__))
        path = sealed_file([*content, arch, *compiler_version(), *versions], ".o", build)
        self.paths = dict.fromkeys(functions, path)


def arch_of(target: Target) -> str:
    """The number of a target's architecture, such as "90".

    Raises
    ------
    ValueError
        Where the target names none, or one without kernels.
    """
    arch = str(target.attrs.get("arch", "")).removeprefix("sm_").rstrip("a")
    if not arch:
        raise ValueError('a target of kind "cuda" must name its architecture, such as "sm_90"')
    check_archs([arch])
    return arch
