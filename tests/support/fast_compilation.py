# SPDX-License-Identifier: Apache-2.0
"""Ways to compile less than users do, for LLVM takes most of the time of most tests.

A cache has sixteen kernels or so, of which a test calls a third, and LLVM's optimisations take two
thirds of a kernel's time. What decides about a kernel's TIR stays: vectors are as wide as this
CPU's. `selections.py` names the tests that compile as users do.
"""

from __future__ import annotations

import functools
import importlib
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import pytest
import tvm
import tvm_ffi
from tvm.target import Target

import tir_kernels
from tir_kernels.spec import KernelSpec
from tvm_pagedkv.compiler import build, targets

MODEL_TARGET = Target({"kind": "llvm", "opt-level": 0})  # any x86-64


_MAKE_CACHES = [
    importlib.import_module(name)
    for name in ("tvm_pagedkv.compiler.create", "tvm_pagedkv.models.caches")
]
_native_target = targets._native_target


@contextmanager
def unoptimized() -> Iterator[None]:
    """Compile for this CPU without optimisations wherever no target is named."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(targets, "_native_target", lambda: _at_level_0(_native_target()))
        yield


def resolve_target(cpu: str) -> Target:
    """Return the target of a CPU, without optimisations within `unoptimized`."""
    target = targets.resolve_target(cpu)
    return target if targets._native_target is _native_target else _at_level_0(target)


def _at_level_0(target: Target) -> Target:
    fields = target.export()
    fields = {name: fields[name] for name in ("kind", "mcpu", "mattr") if name in fields}
    return Target(fields | {"opt-level": 0})


@dataclass(frozen=True)
class _Source:
    """Stands where a library's path does: what the kernels are compiled from."""

    spec: KernelSpec
    target: Target


@contextmanager
def when_called() -> Iterator[None]:
    """Compile each kernel of a cache on the CPU at its first call."""
    load, build_set = build._load, build._build_set
    of_thread = threading.local()  # whether it makes a cache, for several may do so at once

    def find_names(spec: KernelSpec, target: Target, progress: Any) -> tuple:
        if not getattr(of_thread, "makes_cache", False):
            return build_set(spec, target, progress)
        return {name: name for name in tir_kernels.kernel_names(spec)}, _Source(spec, target)

    def find_sets(*arguments: Any) -> build.KernelLibraries:
        of_thread.makes_cache = True
        try:
            return build.build_libraries(*arguments)
        finally:
            of_thread.makes_cache = False

    def load_later(symbols: Mapping[str, str], source: Any) -> Mapping[str, tvm.ffi.Function]:
        if not isinstance(source, _Source):
            return load(symbols, source)
        return MappingProxyType({name: _lazy_kernel(name, source) for name in symbols})

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(build, "_load", load_later)
        patch.setattr(build, "_build_set", find_names)
        for module in _MAKE_CACHES:
            patch.setattr(module, "build_libraries", find_sets)
        yield


def _lazy_kernel(name: str, source: _Source) -> tvm.ffi.Function:
    @functools.cache
    def kernel() -> tvm.ffi.Function:
        builders = {name: functools.partial(tir_kernels.build_kernel, name, source.spec)}
        return build.load_kernels(builders, (name, repr(source.spec)), source.target)[name]

    return tvm_ffi.convert_func(lambda *arguments: kernel()(*arguments))
