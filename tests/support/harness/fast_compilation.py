# SPDX-License-Identifier: Apache-2.0
"""Ways to compile less than users do, for LLVM takes most of the time of most tests.

A cache has sixteen kernels or so, of which a test calls a third, and LLVM's optimisations take two
thirds of a kernel's time. What decides about a kernel's TIR stays: vectors are as wide as this
CPU's. Kernels are linked without the libraries of C++, which take half of the linker's time and of
which they use nothing. `selections.py` names the tests that compile as users do.
"""

from __future__ import annotations

import functools
import importlib
import os
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType, ModuleType
from typing import Any

import tvm
import tvm_ffi
from tvm.support import cc
from tvm.target import Target

import tir_kernels
from tir_kernels.spec import KernelSpec
from tvm_pagedkv.compiler import build, targets

try:
    from .children.sitecustomize import at_level_0
except ImportError:  # in a child, which has no package of tests
    from sitecustomize import at_level_0

MODEL_TARGET = Target({"kind": "llvm", "opt-level": 0})  # any x86-64


_MAKE_CACHES = ("tvm_pagedkv.compiler.create", "tvm_pagedkv_lm.model.caches")
_CHILDREN = Path(__file__).resolve().parent / "children"
_native_target = targets.native_target
_of_thread = threading.local()  # whether it makes a cache, for several may do so at once


def _patches() -> AbstractContextManager:
    import pytest  # not in children, which have no use for it

    return pytest.MonkeyPatch.context()


@contextmanager
def unoptimized() -> Iterator[None]:
    """Compile for this CPU without optimisations wherever no target is named."""
    with _patches() as patch:
        patch.setattr(targets, "native_target", lambda: at_level_0(_native_target()))
        yield


@contextmanager
def in_children() -> Iterator[None]:
    """Compile unoptimized, and when called, in the processes that a test starts."""
    paths = [str(_CHILDREN), os.environ.get("PYTHONPATH", "")]
    with _patches() as patch:
        patch.setenv("PYTHONPATH", os.pathsep.join(filter(None, paths)))
        yield


def path_of_children() -> str:
    """Return the PYTHONPATH of processes that import what this one does, and compile as it does."""
    return os.pathsep.join(filter(None, [os.environ.get("PYTHONPATH"), *sys.path]))


def resolve_target(cpu: str | Mapping) -> Target:
    """Return the target of a CPU, without optimisations within `unoptimized`."""
    target = targets.resolve_target(cpu)
    return target if targets.native_target is _native_target else at_level_0(target)


@dataclass(frozen=True)
class _Source:
    """Stands where a library's path does: what the kernels are compiled from."""

    spec: KernelSpec
    target: Target


@contextmanager
def when_called() -> Iterator[None]:
    """Compile each kernel of a cache on the CPU at its first call."""
    makers = [importlib.import_module(name) for name in _MAKE_CACHES]
    with _patches() as patch:
        patch_compiler(patch.setattr)
        for module in makers:
            patch_maker(patch.setattr, module)
        yield


def patch_compiler(set_attribute: Callable) -> None:
    """Let the compiler leave the kernels of the caches that `patch_maker` patches for later."""
    load, build_set, link = build._load, build._build_set, cc.create_shared

    def find_names(spec: KernelSpec, target: Target, progress: Any) -> tuple:
        if not getattr(_of_thread, "makes_cache", False):
            return build_set(spec, target, progress)
        return {name: name for name in tir_kernels.kernel_names(spec)}, _Source(spec, target)

    def load_later(
        symbols: Mapping[str, str], source: Any, target: Target
    ) -> Mapping[str, tvm.ffi.Function]:
        if not isinstance(source, _Source):
            return load(symbols, source, target)
        return MappingProxyType({name: _lazy_kernel(name, source) for name in symbols})

    def link_objects(output: str, objects: Any, options: Any = None, **how: Any) -> None:
        if options is None and all(str(path).endswith(".o") for path in objects):
            objects, options = [*objects, "-lm", "-lgcc"], ["-nostdlib"]
        link(output, objects, options, **how)

    set_attribute(build, "_load", load_later)
    set_attribute(build, "_build_set", find_names)
    set_attribute(cc, "create_shared", link_objects)


def patch_maker(set_attribute: Callable, module: ModuleType) -> None:
    """Let a module that makes caches say so to the compiler."""

    def find_sets(*arguments: Any) -> build.KernelLibraries:
        _of_thread.makes_cache = True
        try:
            return build.build_libraries(*arguments)
        finally:
            _of_thread.makes_cache = False

    set_attribute(module, "build_libraries", find_sets)


def _lazy_kernel(name: str, source: _Source) -> tvm.ffi.Function:
    @functools.cache
    def kernel() -> tvm.ffi.Function:
        builders = {name: functools.partial(tir_kernels.build_kernel, name, source.spec)}
        return build.load_kernels(builders, (name, repr(source.spec)), source.target)[name]

    return tvm_ffi.convert_func(lambda *arguments: kernel()(*arguments))
