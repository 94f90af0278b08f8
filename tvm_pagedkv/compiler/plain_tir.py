# SPDX-License-Identifier: Apache-2.0
"""From the TIR that kernels for CPUs are written in to the TIR that apache-tvm's passes take.

Kernels have loops with steps, loops that are parallel where there is enough to do, and variables.
"""

from __future__ import annotations

from typing import Any

import tvm
import tvm_ffi
from tvm import tirx
from tvm.ir import Var
from tvm.tirx.buffer import is_buffer_var

from tir_kernels.cpu.isa.vector_rows import PARALLEL_IF
from tir_kernels.cpu.worker import ITEM_BYTES, SERIAL_BELOW_BYTES
from tir_kernels.releases import SBlock, SBlockRealize, TensorLoad, buffer_of


def for_relax(function: tirx.PrimFunc) -> tirx.PrimFunc:
    """Return a kernel for a CPU as a function that a Relax module can have and compile."""
    module = count_from_zero(tvm.IRModule({"main": parallel_where_large(function)}))
    body = _variables_as_arrays(module["main"].body)
    # Relax asks every function for a block around its body.
    root = SBlock([], [], [], "root", body)
    return function.with_body(SBlockRealize([], tirx.const(True, "bool"), root))


def _variables_as_arrays(body: tirx.Stmt) -> tirx.Stmt:
    """Turn variables into arrays of the default scope, those of vectors into arrays of numbers.

    TVM's pipelines allocate the scope "local" on the heap, and know no variables of vectors.
    """
    moved: dict[Var, Var] = {}

    def move(variable: Var, _mutator: Any = None) -> Var:
        if not is_buffer_var(variable) or str(variable.ty.storage_scope) != "local":
            return variable
        if variable not in moved:
            shape, dtype, lanes = variable.ty.shape, str(variable.ty.dtype), _lanes_of(variable)
            if lanes > 1:
                shape, dtype = [lanes], dtype.removesuffix(f"x{lanes}")
            moved[variable] = tirx.decl_buffer(shape, dtype, variable.name, layout=None)
        return moved[variable]

    def indices_of(variable: Var, indices: Any, mutator: Any) -> list:
        lanes = _lanes_of(variable)
        if lanes > 1:
            return [tirx.Ramp(tirx.const(0, "int32"), tirx.const(1, "int32"), lanes)]
        return [mutator.mutate(index) for index in indices]

    def load(found: TensorLoad, mutator: Any) -> Any:
        buffer = move(buffer_of(found))
        if buffer.same_as(buffer_of(found)):
            return mutator.default_mutate(found)
        return buffer[tuple(indices_of(buffer_of(found), found.indices, mutator))]

    def store(found: tirx.BufferStore, mutator: Any) -> Any:
        buffer = move(found.buffer)
        if buffer.same_as(found.buffer):
            return mutator.default_mutate(found)
        indices = indices_of(found.buffer, found.indices, mutator)
        return tirx.BufferStore(buffer, mutator.mutate(found.value), indices)

    callbacks = [(TensorLoad, load), (tirx.BufferStore, store), (Var, move)]
    return tvm_ffi.structural_mutate(body, callbacks)


def _lanes_of(variable: Var) -> int:
    """Return the lanes of the elements of a buffer."""
    _, _, lanes = str(variable.ty.dtype).partition("x")
    return int(lanes) if lanes else 1


def parallel_where_large(function: tirx.PrimFunc) -> tirx.PrimFunc:
    """Let the caller's thread do the items of a loop with too little work to wake others for."""

    is_found = False

    def choose(loop: tirx.For, mutator: Any) -> Any:
        nonlocal is_found
        annotations = loop.annotations
        if ITEM_BYTES not in annotations and PARALLEL_IF not in annotations:
            return mutator.default_mutate(loop)
        is_found = True
        serial, parallel = (
            tirx.For(loop.loop_var, loop.min, loop.extent, kind, loop.body)
            for kind in (tirx.ForKind.SERIAL, tirx.ForKind.PARALLEL)
        )
        if PARALLEL_IF in annotations:
            return tirx.IfThenElse(annotations[PARALLEL_IF], parallel, serial)
        total = tirx.Cast("int64", loop.extent) * annotations[ITEM_BYTES]
        return tirx.IfThenElse(total < SERIAL_BELOW_BYTES, serial, parallel)

    body = tvm_ffi.structural_mutate(function.body, (tirx.For, choose))
    if not is_found:
        return function
    module = tvm.IRModule({"main": function.with_body(body)})
    return tirx.transform.ConvertSSA()(module)["main"]


@tirx.transform.prim_func_pass(opt_level=0)
def count_from_zero(function: tirx.PrimFunc, _module: Any, _context: Any) -> tirx.PrimFunc:
    """Let all loops count from 0 in steps of 1, which the code generator asks for.

    TVM's CanonicalizeLoop leaves the bounds of loops within as they were, and evaluates where a
    loop begins wherever its variable is used, so it cannot be had from an array that the loop
    writes.
    """

    def count(loop: tirx.For, mutator: Any) -> Any:
        step = 1 if loop.step is None else int(loop.step)
        begin, extent = mutator.mutate(loop.min), mutator.mutate(loop.extent)
        is_constant = isinstance(begin, tirx.IntImm)
        if is_constant and int(begin) == 0 and step == 1:
            return mutator.default_mutate(loop)
        kept = []
        if not is_constant:
            first = tirx.decl_buffer(
                [1], begin.ty.dtype, f"first_{loop.loop_var.name}", layout=None
            )
            kept = [tirx.AllocBuffer(first), tirx.BufferStore(first, begin, [0])]
            begin = first[0]
        index = Var(loop.loop_var.name, loop.loop_var.ty)
        mutator.var_remap_set(loop.loop_var, begin + index * step)
        counted = tirx.For(
            index,
            tirx.const(0, extent.ty.dtype),
            extent if step == 1 else tirx.ceildiv(extent, step),
            loop.kind,
            mutator.mutate(loop.body),
            annotations=loop.annotations,
        )
        return tirx.SeqStmt([*kept, counted]) if kept else counted

    return function.with_body(tvm_ffi.structural_mutate(function.body, (tirx.For, count)))


@tirx.transform.prim_func_pass(opt_level=0)
def keep_in_registers(function: tirx.PrimFunc, _module: Any, _context: Any) -> tirx.PrimFunc:
    """Move variables and arrays of scope "local" to the stack, for LLVM to keep in registers.

    TVM would allocate them on the heap. `StorageRewrite` would let others share their memory, if
    they had the default scope before it.
    """
    moved: dict[Var, Var] = {}

    def move(variable: Var, _mutator: Any) -> Var:
        if not is_buffer_var(variable) or str(variable.ty.storage_scope) != "local":
            return variable
        if variable not in moved:
            shape, dtype = variable.ty.shape, variable.ty.dtype
            moved[variable] = tirx.decl_buffer(shape, dtype, variable.name, layout=None)
        return moved[variable]

    def allocate(allocation: tirx.AllocBuffer, mutator: Any) -> Any:
        buffer = move(allocation.buffer, mutator)
        if buffer.same_as(allocation.buffer):
            return mutator.default_mutate(allocation)
        return tirx.AllocBuffer(buffer, {"disable_lower_builtin": tirx.const(1, "bool")})

    callbacks = [(tirx.AllocBuffer, allocate), (Var, move)]
    return function.with_body(tvm_ffi.structural_mutate(function.body, callbacks))
