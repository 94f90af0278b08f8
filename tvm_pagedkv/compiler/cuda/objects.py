# SPDX-License-Identifier: Apache-2.0
"""Kernels for GPUs as object files that are linked to models."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

from tvm import tirx
from tvm.target import Target

import tir_kernels

from ..disk_cache import code_versions, sealed_file
from ..lowering import is_for_this_machine, unique_symbol
from ..progress import compiling
from .build import SOURCES
from .library import check_archs, compile_object, compiler_version
from .source import cuda_source


class CudaKernelObjects:
    """One object file with all kernels of a cache, compiled or found in the disk cache.

    Parameters
    ----------
    builders : mapping
        Symbol, from `cuda_kernel_symbol` -> callable that returns the PrimFunc. It is called only
        if the file does not exist.
    target : tvm.target.Target
        A target of kind "cuda" with an `arch` such as "sm_90".

    Attributes
    ----------
    paths : dict
        Symbol -> object file.

    Raises
    ------
    ValueError
        If the architecture has no kernels.
    RuntimeError
        If nvcc is missing or fails.
    """

    def __init__(self, builders: Mapping[str, Callable[[], tirx.PrimFunc]], target: Target):
        def build(path: Path) -> None:
            with compiling(f"{len(builders)} kernels for GPUs: {arch_of(target)}"):
                functions = {symbol: builder() for symbol, builder in builders.items()}
                compile_object(cuda_source(functions), path, [arch_of(target)])

        self.paths = dict.fromkeys(builders, sealed_file(sorted(builders), ".o", build))


def cuda_kernel_symbol(name: str, key: str, target: Target) -> str:
    """Return the symbol of a GPU kernel; see `lowering.kernel_symbol`.

    `key` must identify the whole set of kernels in the object file: another set may contain the
    same kernel, and it must be possible to link both to one library.
    """
    versions = code_versions(*SOURCES, Path(__file__), Path(tir_kernels.__file__).parent)
    return unique_symbol(name, [key, arch_of(target), *compiler_version(), *versions])


def arch_of(target: Target) -> str:
    """Return the compute capability of a target, such as "90", or "90a" where it says so.

    Raises
    ------
    ValueError
        If the target names none or one without kernels, or if its host has another architecture
        than this machine, for which the launchers are compiled.
    """
    arch = str(target.attrs.get("arch", "")).removeprefix("sm_")
    if not arch:
        raise ValueError('a target of kind "cuda" must name its architecture, such as "sm_90"')
    check_archs([arch])
    if target.host is not None and not is_for_this_machine(target.host):
        raise ValueError(
            "kernels for GPUs are compiled for hosts like this machine only; the target's host is "
            f"{target.host.attrs['mtriple']}"
        )
    return arch
