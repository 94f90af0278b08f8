# SPDX-License-Identifier: Apache-2.0
"""From the PrimFunc of a CPU kernel to an object file, by the few passes that kernels need.

The pipeline inside apache-tvm serves schedules of every kind; most of its passes look in vain for
something to do in a kernel, and one of them, the compaction of buffers, takes longer than all of
those here together. Common subexpressions are left to LLVM.
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import tvm
import tvm_ffi
from tvm import s_tir, tirx
from tvm.ir import Call, GlobalVar, PointerType, PrimType, StringImm, Var
from tvm.support import cc
from tvm.target import Target, codegen
from tvm.tirx.buffer import is_buffer_var

from tir_kernels.cpu.tasks import TASK_LOOP

from .disk_cache import code_versions, sealed_file

_NUM_THREADS = 2  # LLVM takes most of the time, and the largest kernel a quarter of it


class KernelObjects:
    """Object files of kernels, compiled side by side or found on the disk.

    What a file is found by is the code of its kernel: caches and models whose kernels are alike
    share them.

    Parameters
    ----------
    functions : mapping
        Symbol -> PrimFunc.
    target : tvm.target.Target
    """

    def __init__(self, functions: Mapping[str, tirx.PrimFunc], target: Target):
        versions = code_versions(Path(__file__))
        self._target = target

        def object_of(symbol: str) -> Path:
            function = functions[symbol]

            def build(path: Path) -> None:
                compile_kernel(function, symbol, target).write_to_file(str(path), "o")

            content = f"{tvm_ffi.structural_hash(function):x}"
            return sealed_file([symbol, content, str(target), *versions], ".o", build)

        # The large ones first, so that no thread is left alone with one. The calls of a pass and of
        # LLVM let other threads run.
        order = sorted(functions, key=lambda symbol: len(functions[symbol].params), reverse=True)
        with ThreadPoolExecutor(_NUM_THREADS) as pool:
            self.paths = dict(zip(order, pool.map(object_of, order), strict=True))

    def export_library(self, path: str) -> None:
        """Link all to a shared library.

        Raises
        ------
        RuntimeError
            Without a linker for the target's architecture.
        """
        objects = [str(object_) for object_ in self.paths.values()]
        cc.create_shared(path, objects, cc=cross_compiler(self._target))


def cross_compiler(target: Target) -> str | None:
    """What links code for another architecture than this machine's; None where it is the same."""
    triple = str(target.attrs.get("mtriple", ""))
    architecture = triple.split("-")[0]
    if not triple or str(codegen.llvm_get_system_triple()).startswith(architecture + "-"):
        return None
    name = f"{architecture}-linux-gnu-g++"
    if shutil.which(name) is None:
        raise RuntimeError(
            f"cannot link code for {triple}: no {name} on PATH; install it (Debian and Ubuntu: "
            f"g++-{architecture.replace('_', '-')}-linux-gnu)"
        )
    return name


def compile_kernel(function: tirx.PrimFunc, symbol: str, target: Target) -> tvm.runtime.Module:
    """Compile one kernel to a module with the function `symbol`."""
    return tvm.get_global_func("target.build.llvm")(lower(function, symbol, target), target)


def lower(function: tirx.PrimFunc, symbol: str, target: Target) -> tvm.IRModule:
    """Lower one kernel to what the code generator takes."""
    module = tvm.IRModule(share_task_body(function, symbol))
    return tvm.transform.Sequential(
        [
            tirx.transform.BindTarget(target.with_host(target)),
            s_tir.transform.CanonicalizeLoop(),
            tirx.transform.FlattenBuffer(),
            tirx.transform.BF16ComputeLegalize(),
            tirx.transform.StorageRewrite(),  # moves buffers out of loops
            tirx.transform.StmtSimplify(),  # or LLVM has three times the work
            s_tir.transform.RewriteUnsafeSelect(),
            _run_on_cpu,
            tirx.transform.MakePackedAPI(),
            tirx.transform.BF16StorageLegalize(),
            tirx.transform.LowerTVMBuiltin(),
            tirx.transform.LowerIntrin(),
        ]
    )(module)


def share_task_body(function: tirx.PrimFunc, symbol: str) -> dict[GlobalVar, tirx.PrimFunc]:
    """Give the body that `for_tasks` emits twice, in parallel and alone, a function of its own.

    Everything that LLVM does with a kernel takes half the time then.

    Returns
    -------
    dict
        The kernel, named `symbol`, and its private functions.
    """
    functions = {}

    def share(branch: tirx.IfThenElse, mutator):
        loop = branch.then_case
        if not isinstance(loop, tirx.For) or TASK_LOOP not in loop.annotations:
            return mutator.default_mutate(branch)
        name = GlobalVar(f"{symbol}_task_{len(functions)}")
        body = functions[name] = _TaskBody(loop)
        task = Var(loop.loop_var.name, loop.loop_var.ty)
        parallel = tirx.For(task, loop.min, loop.extent, loop.kind, body.call(name, task))
        return tirx.IfThenElse(branch.condition, parallel, body.call(name, loop.min))

    body = tvm_ffi.structural_mutate(function.body, (tirx.IfThenElse, share))
    kernel = function.with_body(body).with_attr("global_symbol", symbol)
    return {GlobalVar(symbol): kernel} | {name: f.function for name, f in functions.items()}


class _TaskBody:
    """The body of a loop as a function of its variable and of what it takes from around it."""

    def __init__(self, loop: tirx.For):
        self.arguments: list = []
        parameters, scalars, entry = [], [], []
        written: list = []
        tvm_ffi.structural_walk(
            loop.body, (tirx.BufferStore, lambda store: written.append(store.buffer))
        )

        def take(name: str, type_, argument) -> Var:
            parameters.append(Var(name, type_))
            self.arguments.append(argument)
            return parameters[-1]

        def keep(variable: Var) -> None:
            if not any(variable.same_as(known) for known in scalars):
                scalars.append(variable)

        for variable in tirx.analysis.undefined_vars(loop.body, [loop.loop_var]):
            if not is_buffer_var(variable):
                keep(variable)
                continue
            buffer = variable.ty
            is_constant = not any(variable.same_as(other) for other in written)
            if is_constant and [str(extent) for extent in buffer.shape] == ["1"]:  # a temporary
                value = take(variable.name, buffer.dtype, variable[0])
                entry += [tirx.AllocBuffer(variable), tirx.BufferStore(variable, value, [0])]
                continue
            pointer = PointerType(buffer.dtype, buffer.storage_scope)
            data = take(f"{variable.name}_data", pointer, variable.data)
            entry.append(tirx.DeclBuffer(variable, data=data))
            extents = [*buffer.shape, *buffer.strides, buffer.elem_offset]
            tvm_ffi.structural_walk(extents, (Var, keep))
        # The code generator ends the function with `return 0`.
        body = tirx.SeqStmt([*entry, loop.body])
        for data in parameters:
            if isinstance(data.ty, PointerType):  # LLVM would believe in whole vectors
                alignment = tirx.const(data.ty.element_type.dtype.itemsize, "int32")
                body = tirx.AttrStmt(data, "storage_alignment", alignment, body)
        self.arguments += scalars
        parameters = [loop.loop_var, *parameters, *scalars]
        function = tirx.PrimFunc(parameters, body, ret_type=PrimType("int32"))
        self.function = function.with_attr("tirx.noalias", True)

    def call(self, name: GlobalVar, task) -> tirx.AssertStmt:
        """Call it; what it returns is not 0 when a buffer could not be allocated."""
        result = Call(name, [task, *self.arguments], ret_ty=PrimType("int32"))
        message = StringImm("no memory for the buffers of a task")
        return tirx.AssertStmt(result == 0, StringImm("RuntimeError"), [message])


@tirx.transform.prim_func_pass(opt_level=0)
def _run_on_cpu(function, _module, _context):
    """Say where the private functions run, as `MakePackedAPI` says it of the kernels."""
    if "global_symbol" in (function.attrs or {}):
        return function
    zero, cpu = tirx.const(0, "int32"), tirx.const(1, "int32")
    body = tirx.AttrStmt(zero, "device_id", zero, function.body)
    return function.with_body(tirx.AttrStmt(zero, "device_type", cpu, body))
