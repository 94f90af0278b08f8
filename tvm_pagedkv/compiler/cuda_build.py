# SPDX-License-Identifier: Apache-2.0
"""A configuration becomes compiled kernels for GPUs, kept on disk for the next time."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from tvm.target import Target

import tir_kernels
from tir_kernels.spec import CudaTarget, KernelSpec

from .cuda_library import ARCHS, compile_library, compiler_version
from .cuda_source import cuda_source
from .disk_cache import code_versions, sealed_file

SOURCES = tuple(
    Path(__file__).with_name(name)
    for name in ("cuda_build.py", "cuda_library.py", "cuda_source.py", "cuda_runtime.py")
)


def is_cuda(target) -> bool:
    """Whether a target, as `build.build_kernels` takes it, is a GPU."""
    kind = target.get("kind") if isinstance(target, Mapping) else target
    return str(target.kind.name if isinstance(target, Target) else kind).startswith("cuda")


def cuda_spec(spec: KernelSpec) -> KernelSpec:
    """The spec of the same layers for a GPU."""
    return replace(spec, target=CudaTarget())


def build_cuda_set(
    spec: KernelSpec, archs: Sequence[str] | None, progress: Callable[[str], None]
) -> tuple[Mapping[str, str], Path]:
    """Compile the kernels of a spec into one library, or find it on the disk.

    Parameters
    ----------
    spec : KernelSpec
        For a GPU.
    archs : sequence of str, optional
        As `cuda_library.compile_library` takes them; None: all that it knows.
    progress : callable
        Called with a line of text when they have to be compiled.

    Returns
    -------
    symbols : mapping
        Kernel name -> symbol.
    path : Path
        The library.
    """
    archs = tuple(ARCHS if archs is None else archs)
    symbols = {name: f"pagedkv_{name}" for name in tir_kernels.kernel_names(spec)}

    def build(path: Path) -> None:
        start = time.perf_counter()
        progress(f"compiling {len(symbols)} kernels for GPUs: {', '.join(archs)}")
        functions = {
            symbol: tir_kernels.build_kernel(name, spec) for name, symbol in symbols.items()
        }
        compile_library(cuda_source(functions), path, archs)
        progress(f"compiled in {time.perf_counter() - start:.1f} s")

    versions = code_versions(*SOURCES, Path(tir_kernels.__file__).parent)
    return symbols, sealed_file([repr(spec), *archs, *compiler_version(), *versions], ".so", build)
