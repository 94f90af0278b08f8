# SPDX-License-Identifier: Apache-2.0
"""Code for CPUs that this one is not: which names may be compiled and run, and a guard.

The features of the CPU are those that `tvm_pagedkv.compiler.targets.cpu_features` returns. So a
process with ``TVM_PAGEDKV_CPU_FEATURES`` tests as a machine with these features only would, and
where that one would end with an illegal instruction, a test fails.
"""

from __future__ import annotations

import functools

import tvm
import tvm_ffi
from tvm.target import Target, codegen

from tvm_pagedkv.compiler import targets

_BUILD = "target.build.llvm"


def runs_here(cpu: str) -> bool:
    """Whether this machine runs code for a CPU by its name."""
    triple = str(codegen.llvm_get_system_triple())
    return codegen.llvm_is_valid_cpu(cpu, triple) and not _obstacle(targets.resolve_target(cpu))


def _obstacle(target: Target) -> str:
    try:
        targets.require_runnable(target)
    except ValueError as error:
        return str(error)
    return ""


@functools.cache
def install() -> None:
    """Let functions of modules that this machine cannot run raise an error when they are taken.

    The package refuses libraries; this is for modules that tests compile in memory.
    """
    build, get_function = tvm.get_global_func(_BUILD), tvm_ffi.Module.get_function
    foreign: list[tuple[tvm_ffi.Module, str]] = []

    def build_and_note(module: tvm.IRModule, target: Target) -> tvm_ffi.Module:
        built = build(module, target)
        obstacle = _obstacle(target)
        if obstacle:
            foreign.append((built, obstacle))
        return built

    def get_runnable_function(
        self: tvm_ffi.Module, name: str, query_imports: bool = False
    ) -> tvm_ffi.Function:
        for module, obstacle in foreign:
            if any(module.same_as(each) for each in (self, *self.imports)):
                raise AssertionError(f"a test runs foreign code: {obstacle}")
        return get_function(self, name, query_imports)

    tvm.register_global_func(_BUILD, build_and_note, override=True)
    tvm_ffi.Module.get_function = get_runnable_function
