# SPDX-License-Identifier: Apache-2.0
"""The compiled kernels of a model's cache: how the model refers to them, and what it links."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from pathlib import Path

import tvm
import tvm_ffi
from tvm import relax, tirx
from tvm.relax import BlockBuilder
from tvm.target import Target

from ..compiler import KernelObjects, is_cuda, kernel_symbol
from ..compiler.cuda import CudaKernelObjects, cuda_kernel_symbol

_ATTRIBUTE = "external_mods"  # of a module: what `relax.build` links to it
# A library that is attached to a module more than once is linked once, if it is the same object.
_loaded: dict[tuple[str, ...], tvm.runtime.Module] = {}


class ModelKernels:
    """The kernels that a model needs for a cache.

    Parameters
    ----------
    target : tvm.target.Target
    key : str
        What decides which kernels these are.
    """

    def __init__(self, target: Target, key: str):
        self._target, self._key = target, key
        self._builders: dict[str, Callable[[], tirx.PrimFunc]] = {}

    def refer(self, name: str, key: str, build: Callable[[], tirx.PrimFunc]) -> relax.ExternFunc:
        """An expression for a kernel, which `compile` compiles.

        Parameters
        ----------
        name : str
        key : str
            What decides its code besides its name: the repr of its spec.
        build : callable
            Returns the PrimFunc.
        """
        if is_cuda(self._target):
            symbol = cuda_kernel_symbol(name, f"{key} of {self._key}", self._target)
        else:
            symbol = kernel_symbol(name, key, self._target)
        self._builders[symbol] = build
        return relax.ExternFunc(symbol)

    def compile(self) -> list[tvm.runtime.Module]:
        """Static libraries with the kernels, compiled or found on the disk.

        Returns
        -------
        list of tvm.runtime.Module
            The same objects in all caches of this process that share kernels.
        """
        objects: CudaKernelObjects | KernelObjects
        if is_cuda(self._target):
            objects = CudaKernelObjects(self._builders, self._target)
        else:
            what = f"{len(self._builders)} kernels of a model's cache"
            objects = KernelObjects(self._builders, self._target, what)
        symbols_of: dict[Path, list[str]] = defaultdict(list)
        for symbol, path in objects.paths.items():
            symbols_of[path].append(symbol)
        return [_load(path, tuple(symbols)) for path, symbols in symbols_of.items()]


def _load(path: Path, symbols: tuple[str, ...]) -> tvm.runtime.Module:
    if symbols not in _loaded:
        loaded = tvm.runtime.load_static_library(str(path), symbols)
        return _loaded.setdefault(symbols, loaded)
    return _loaded[symbols]


def link_when_finalized(builder: BlockBuilder, libraries: list[tvm.runtime.Module]) -> None:
    """Let the module that a builder makes have libraries linked to it when it is compiled.

    ``export_tvm`` of ``nn`` models makes modules by a builder, and has no other place for libraries
    that a model needs without its author's doing. `BlockBuilder.finalize` is told to attach them.
    """
    pending = vars(builder).setdefault("_pagedkv_libraries", [])
    pending += [library for library in libraries if library not in pending]

    def finalize() -> tvm.IRModule:
        del builder.finalize
        module = builder.finalize()
        attached = list((module.attrs or {}).get(_ATTRIBUTE, []))
        missing = [library for library in pending if library not in attached]
        # `relax.transform.AttachExternModules` appends to what it finds.
        return module.with_attr(_ATTRIBUTE, tvm_ffi.List([*attached, *missing]))

    builder.finalize = finalize
