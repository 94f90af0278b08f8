# SPDX-License-Identifier: Apache-2.0
"""Kernels for GPUs as an object file, to be linked to a model."""

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
    """One object file with all kernels of a cache, compiled or found on the disk.

    Parameters
    ----------
    builders : mapping
        Symbol, as `cuda_kernel_symbol` makes it -> callable that returns the PrimFunc. It is called
        only where there is no file yet.
    target : tvm.target.Target
        Of kind "cuda"; its `arch` says what for, such as "sm_90".

    Raises
    ------
    ValueError
        For an architecture that has no kernels.
    RuntimeError
        Without nvcc.
    """

    def __init__(self, builders: Mapping[str, Callable[[], tirx.PrimFunc]], target: Target):
        def build(path: Path) -> None:
            with compiling(f"{len(builders)} kernels for GPUs: {arch_of(target)}"):
                functions = {symbol: builder() for symbol, builder in builders.items()}
                compile_object(cuda_source(functions), path, [arch_of(target)])

        self.paths = dict.fromkeys(builders, sealed_file(sorted(builders), ".o", build))


def cuda_kernel_symbol(name: str, key: str, target: Target) -> str:
    """The symbol of a kernel for a GPU, as `lowering.kernel_symbol` is for a CPU.

    Its `key` must tell the whole set of kernels that the object file holds: another set may have
    the same kernel, and both must be able to lie in one library.
    """
    versions = code_versions(*SOURCES, Path(__file__), Path(tir_kernels.__file__).parent)
    return unique_symbol(name, [key, arch_of(target), *compiler_version(), *versions])


def arch_of(target: Target) -> str:
    """The number of a target's architecture, such as "90".

    Raises
    ------
    ValueError
        Where the target names none, or one without kernels, or a host of another architecture than
        this machine's: the code that launches kernels is compiled for this one.
    """
    arch = str(target.attrs.get("arch", "")).removeprefix("sm_").rstrip("a")
    if not arch:
        raise ValueError('a target of kind "cuda" must name its architecture, such as "sm_90"')
    check_archs([arch])
    if target.host is not None and not is_for_this_machine(target.host):
        raise ValueError(
            "kernels for GPUs are compiled for hosts like this machine only; the target's host is "
            f"{target.host.attrs['mtriple']}"
        )
    return arch
