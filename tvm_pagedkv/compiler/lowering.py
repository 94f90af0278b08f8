# SPDX-License-Identifier: Apache-2.0
"""Lowering of CPU kernels from PrimFuncs to object files, with only the passes that they need.

apache-tvm's default pipeline serves schedules of every kind. Most of its passes have nothing to do
in these kernels, and one of them, buffer compaction, takes longer than all passes here together.
Common subexpressions are left to LLVM.
"""

from __future__ import annotations

import contextlib
import hashlib
import shutil
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import tvm
import tvm_ffi
from tvm import s_tir, tirx
from tvm.ir import Var
from tvm.support import cc
from tvm.target import Target, codegen

import tir_kernels
from tir_kernels.releases import SERIES

from .bfloat16_loads import widen_bfloat16_vectors
from .disk_cache import code_versions, found_file, sealed_file
from .plain_tir import count_from_zero, keep_in_registers, parallel_where_large
from .progress import compiling
from .tasks import share_task_body

_IS_CURRENT = SERIES >= (0, 27)
_NUM_THREADS = 2  # more would not help: the largest kernel takes a quarter of LLVM's time


class KernelObjects:
    """Object files of kernels, compiled in parallel or found in the disk cache.

    Caches and models share the files of the kernels that they have in common.

    Parameters
    ----------
    builders : mapping
        Symbol, from `kernel_symbol` -> callable that returns the PrimFunc. It is called only if the
        file does not exist.
    target : tvm.target.Target
    what : str, optional
        Description for the log; None: the caller logs.

    Attributes
    ----------
    paths : dict
        Symbol -> object file.
    """

    def __init__(
        self,
        builders: Mapping[str, Callable[[], tirx.PrimFunc]],
        target: Target,
        what: str | None = None,
    ):
        self._target = target
        found = {symbol: found_file([symbol], ".o") for symbol in builders}
        missing = [symbol for symbol in builders if found[symbol] is None]
        report = compiling(what) if what and missing else contextlib.nullcontext()
        with report:
            compiled = self._compile({symbol: builders[symbol]() for symbol in missing})
        self.paths = {symbol: found[symbol] or compiled[symbol] for symbol in builders}

    def _compile(self, functions: Mapping[str, tirx.PrimFunc]) -> dict[str, Path]:
        def compile_missing(symbol: str) -> Path:
            def build(path: Path) -> None:
                compiled = compile_kernel(functions[symbol], symbol, self._target)
                compiled.write_to_file(str(path), "o")

            return sealed_file([symbol], ".o", build)

        # Large kernels come first, so that they do not run alone at the end. TVM releases Python's
        # lock in passes and in LLVM.
        order = sorted(functions, key=lambda symbol: len(functions[symbol].params), reverse=True)
        with ThreadPoolExecutor(_NUM_THREADS) as pool:
            return dict(zip(order, pool.map(compile_missing, order), strict=True))

    def export_library(self, path: str) -> None:
        """Link all object files to a shared library.

        Raises
        ------
        RuntimeError
            If there is no linker for the target's architecture.
        """
        objects = [str(object_) for object_ in self.paths.values()]
        cc.create_shared(path, objects, cc=cross_compiler(self._target))


def kernel_symbol(name: str, key: str, target: Target) -> str:
    """Return the symbol of a CPU kernel. Kernels whose code may differ have different symbols.

    Parameters
    ----------
    name : str
        The kernel's name.
    key : str
        What decides its code besides name, target, compiler and sources: the repr of its spec.
    target : tvm.target.Target
    """
    versions = code_versions(Path(__file__), Path(tir_kernels.__file__).parent)
    return unique_symbol(name, [key, str(target), *versions])


def unique_symbol(name: str, key: Iterable[str]) -> str:
    """Return a symbol with the kernel's name and a digest of everything that decides its code."""
    digest = hashlib.sha256("\n".join([name, *key]).encode()).hexdigest()
    return f"pagedkv_{name}_{digest[:16]}"


def is_for_this_machine(target: Target) -> bool:
    """Return whether a CPU target has this machine's architecture."""
    architecture = _triple_of(target).split("-")[0]
    return str(codegen.llvm_get_system_triple()).startswith(architecture + "-") or not architecture


def cross_compiler(target: Target) -> str | None:
    """Return the linker for a target of another architecture; None for this machine's.

    Raises
    ------
    RuntimeError
        If there is none on PATH.
    """
    if is_for_this_machine(target):
        return None
    triple = _triple_of(target)
    architecture = triple.split("-")[0]
    name = f"{architecture}-linux-gnu-g++"
    if shutil.which(name) is None:
        raise RuntimeError(
            f"cannot link code for {triple}: no {name} on PATH; install it (Debian and Ubuntu: "
            f"g++-{architecture.replace('_', '-')}-linux-gnu)"
        )
    return name


def _triple_of(target: Target) -> str:
    return str(target.attrs.get("mtriple", ""))


def compile_kernel(function: tirx.PrimFunc, symbol: str, target: Target) -> tvm.runtime.Module:
    """Compile one kernel to a module with the function `symbol`."""
    return tvm.get_global_func("target.build.llvm")(lower(function, symbol, target), target)


def lower(function: tirx.PrimFunc, symbol: str, target: Target) -> tvm.IRModule:
    """Lower one kernel to the input of the code generator."""
    function = parallel_where_large(function)
    module = tvm.IRModule(share_task_body(function, symbol))
    return tvm.transform.Sequential(
        [
            tirx.transform.BindTarget(target.with_host(target)),
            count_from_zero,
            _flatten_buffers,
            *([] if _IS_CURRENT else [widen_bfloat16_vectors]),
            tirx.transform.BF16ComputeLegalize(),
            tirx.transform.StorageRewrite(),  # moves buffers out of loops
            keep_in_registers,
            tirx.transform.UnrollLoop(),  # those of `T.unroll` only
            # Or LLVM takes three times as long. That of 0.26 drops conditions on memory which held
            # before, even if the memory was written since.
            *([tirx.transform.StmtSimplify()] if _IS_CURRENT else []),
            s_tir.transform.RewriteUnsafeSelect(),
            _run_on_cpu,
            tirx.transform.MakePackedAPI(),
            tirx.transform.BF16StorageLegalize(),
            tirx.transform.LowerTVMBuiltin(),
            tirx.transform.LowerIntrin(),
        ]
    )(module)


@tirx.transform.prim_func_pass(opt_level=0)
def _run_on_cpu(function: tirx.PrimFunc, _module: Any, _context: Any) -> tirx.PrimFunc:
    """Set the device of the private functions, as `MakePackedAPI` does for the kernels."""
    if "global_symbol" in (function.attrs or {}):
        return function
    zero, cpu = tirx.const(0, "int32"), tirx.const(1, "int32")
    body = tirx.AttrStmt(zero, "device_id", zero, function.body)
    return function.with_body(tirx.AttrStmt(zero, "device_type", cpu, body))


@tvm.transform.module_pass(opt_level=0, name="FlattenBuffersWithoutSearch")
def _flatten_buffers(module: tvm.IRModule, _context: Any) -> tvm.IRModule:
    """Flatten buffers without a search for iteration maps, half of the time of all passes.

    FlattenBuffer does not search where the extent of a loop depends on another loop, so there is
    one around the body meanwhile. `StmtSimplify` finds the same indices.
    """
    zero, one = tirx.const(0, "int32"), tirx.const(1, "int32")
    outer, inner = Var("outer", "int32"), Var("inner", "int32")

    def wrap(function: tirx.PrimFunc) -> tirx.PrimFunc:
        body = tirx.For(inner, zero, outer + one, tirx.ForKind.SERIAL, function.body)
        return function.with_body(tirx.For(outer, zero, one, tirx.ForKind.SERIAL, body))

    def unwrap(loop: tirx.For, mutator: Any) -> Any:
        return loop.body.body if loop.loop_var.same_as(outer) else mutator.default_mutate(loop)

    wrapped = {name: wrap(function) for name, function in module.functions_items()}
    flat = tirx.transform.FlattenBuffer()(tvm.IRModule(wrapped))
    functions = {
        name: function.with_body(tvm_ffi.structural_mutate(function.body, (tirx.For, unwrap)))
        for name, function in flat.functions_items()
    }
    return tvm.IRModule(functions)
