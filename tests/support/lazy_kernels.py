# SPDX-License-Identifier: Apache-2.0
"""Kernels of caches on the CPU that are compiled when they are first called.

A cache has sixteen kernels or so, of which a test calls a third.
"""

from __future__ import annotations

import functools
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
from tvm_pagedkv.compiler import build


@dataclass(frozen=True)
class _KernelSet:
    """Stands where a library's path does: what the kernels are compiled from."""

    spec: KernelSpec
    target: Target


@contextmanager
def compiled_when_called() -> Iterator[None]:
    """Let caches that are made within compile each kernel at its first call."""
    load = build._load

    def find_names(spec: KernelSpec, target: Target, progress: Any) -> tuple:
        names = {name: name for name in tir_kernels.kernel_names(spec)}
        return names, _KernelSet(spec, target)

    def load_later(symbols: Mapping[str, str], source: Any) -> Mapping[str, tvm.ffi.Function]:
        if not isinstance(source, _KernelSet):
            return load(symbols, source)
        return MappingProxyType({name: _lazy_kernel(name, source) for name in symbols})

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(build, "_build_set", find_names)
        patch.setattr(build, "_load", load_later)
        yield


def _lazy_kernel(name: str, source: _KernelSet) -> tvm.ffi.Function:
    @functools.cache
    def kernel() -> tvm.ffi.Function:
        builders = {name: functools.partial(tir_kernels.build_kernel, name, source.spec)}
        return build.load_kernels(builders, (name, repr(source.spec)), source.target)[name]

    return tvm_ffi.convert_func(lambda *arguments: kernel()(*arguments))
