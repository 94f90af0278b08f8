# SPDX-License-Identifier: Apache-2.0
"""The compiled kernels of a model's cache: references in the model, and libraries to link."""

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

_ATTRIBUTE = "external_mods"  # the attribute of a module with what `relax.build` links
# TVM links a library that is attached more than once only once if it is the same object.
_loaded: dict[tuple[str, ...], tvm.runtime.Module] = {}


class ModelKernels:
    """Collects the kernels that a model needs for a cache, and compiles them.

    Parameters
    ----------
    target : tvm.target.Target
    key : str
        Identifies the set of kernels: the repr of its specs.
    """

    def __init__(self, target: Target, key: str):
        self._target, self._key = target, key
        self._builders: dict[str, Callable[[], tirx.PrimFunc]] = {}

    def refer(self, name: str, key: str, build: Callable[[], tirx.PrimFunc]) -> relax.ExternFunc:
        """Return an expression for a kernel that `compile` will compile.

        Parameters
        ----------
        name : str
            The kernel's name.
        key : str
            What decides its code besides the name: the repr of its spec.
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
        """Compile the kernels, or find them in the disk cache.

        Returns
        -------
        list of tvm.runtime.Module
            Static libraries. Caches of this process that share kernels get the same objects.
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
    """Attach libraries to the module that a builder makes, so that compiling the module links them.

    ``export_tvm`` of ``nn`` models uses a builder and has no hook for libraries, so this wraps
    `BlockBuilder.finalize`.
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
