# SPDX-License-Identifier: Apache-2.0
"""Compilation of the kernels of a spec for GPUs, with the disk cache."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

import tir_kernels
from tir_kernels.conv_spec import ConvSpec
from tir_kernels.index_spec import IndexSpec
from tir_kernels.recurrent_spec import RecurrentSpec
from tir_kernels.spec import CudaTarget, KernelSpec

from ..disk_cache import code_versions, sealed_file
from ..progress import compiling
from .families import by_family, compile_families, family_of
from .library import ARCHS, compiler_version

SOURCES = (Path(__file__).parent,)  # a change of any of these files makes new kernels


Spec = TypeVar("Spec", bound=KernelSpec | RecurrentSpec | ConvSpec | IndexSpec)


def cuda_spec(spec: Spec, arch: str | None = None) -> Spec:
    """Return the spec of the same layers for a GPU.

    Parameters
    ----------
    spec : KernelSpec, RecurrentSpec, ConvSpec or IndexSpec
    arch : str, optional
        A compute capability, such as "90a"; None: the kernels that all GPUs run.

    Raises
    ------
    ValueError
        If K and V have codecs of their own, or one that kernels for GPUs do not know.
    """
    if isinstance(spec, KernelSpec):
        _check_codecs(spec)
    return replace(spec, target=family_of(arch) if arch else CudaTarget())


def _check_codecs(spec: KernelSpec) -> None:
    if spec.codec is not None and spec.codec.k != spec.codec.v:
        raise ValueError(
            f"kv_dtype {spec.kv_dtype!r}: kernels for GPUs know one codec for both K and V; choose "
            "one, or a CPU"
        )
    if spec.codec is not None and not spec.codec.k.has_cuda_kernels:
        raise ValueError(
            f"kv_dtype {spec.kv_dtype!r} has kernels for CPUs only; choose another codec, or a CPU"
        )


def build_cuda_set(
    spec: KernelSpec | RecurrentSpec | ConvSpec | IndexSpec,
    archs: Sequence[str] | None = None,
    progress: Callable[[str], None] | None = None,
) -> tuple[Mapping[str, str], Path]:
    """Compile the kernels of a spec into one library, or find it in the disk cache.

    Parameters
    ----------
    spec : KernelSpec, RecurrentSpec, ConvSpec or IndexSpec
        A spec for a GPU, from `cuda_spec`.
    archs : sequence of str, optional
        Compute capabilities, as for `library.compile_library`; None: all of `library.ARCHS`.
    progress : callable, optional
        Called with a line of text before and after a compilation, which is logged as well.

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
        with compiling(f"{len(symbols)} kernels for GPUs: {', '.join(archs)}", progress):
            compile_families(
                lambda name, family: tir_kernels.build_kernel(name, replace(spec, target=family)),
                symbols,
                path,
                archs,
            )

    versions = code_versions(*SOURCES, Path(tir_kernels.__file__).parent)
    key = [repr(spec), repr(by_family(archs)), *compiler_version(), *versions]
    return symbols, sealed_file(key, ".so", build)
