# SPDX-License-Identifier: Apache-2.0
"""Loops over the tasks of a kernel: functions for their bodies, and memory for their buffers.

TVM would take the buffers of a task from a pool of the thread that does it. The thread that calls
the kernel takes those of all tasks at once instead, so a cache that calls can lend memory of its
own: `tir_kernels.cpu.tasks`.
"""

from __future__ import annotations

from typing import Any

import tvm
import tvm_ffi
from tvm import tirx
from tvm.ir import Call, GlobalVar, PointerType, PrimType, Var
from tvm.tirx.buffer import is_buffer_var

from tir_kernels.cpu.tasks import TASK_LOOP, allocate, release
from tir_kernels.releases import StringImm

_MIN_HEAP_BYTES = 1024  # TVM puts smaller buffers on the stack
_LINE = 64  # the alignment of a buffer
# Between buffers: most sizes are powers of two, and the buffers would compete for the same sets of
# the caches. Prefill of short prompts is 4 % faster.
_GAP = 192
_PAGE = 4096  # the alignment of the buffers of a task, which threads first touch


def share_task_body(function: tirx.PrimFunc, symbol: str) -> dict[GlobalVar, tirx.PrimFunc]:
    """Move the bodies of loops over tasks to private functions, which a lone task calls itself.

    More tasks than one call them in a parallel loop.

    Returns
    -------
    dict
        The kernel, named `symbol`, and its private functions.
    """
    functions: dict[GlobalVar, _TaskBody] = {}

    def share(loop: tirx.For, mutator: Any) -> Any:
        if TASK_LOOP not in loop.annotations:
            return mutator.default_mutate(loop)
        name = GlobalVar(f"{symbol}_task_{len(functions)}")
        body = functions[name] = _TaskBody(loop)
        task = Var(loop.loop_var.name, loop.loop_var.ty)
        parallel = tirx.For(task, loop.min, loop.extent, loop.kind, body.call(name, task))
        either = tirx.IfThenElse(loop.extent > 1, parallel, body.call(name, loop.min))
        return body.with_memory(either, loop.extent)

    body = tvm_ffi.structural_mutate(function.body, (tirx.For, share))
    kernel = function.with_body(body).with_attr("global_symbol", symbol)
    return {GlobalVar(symbol): kernel} | {name: f.function for name, f in functions.items()}


class _TaskBody:
    """The body of a loop as a function of its variable and of the variables it captures.

    Its buffers that are too large for the stack are arguments as well.

    Attributes
    ----------
    num_bytes : int
        Bytes of these buffers, for one task.
    """

    def __init__(self, loop: tirx.For):
        self.arguments: list = []
        self.offsets: list[int] = []
        self.memory = Var("task_buffers", PointerType(PrimType("uint8")))
        parameters: list[Var] = []
        scalars: list[Var] = []
        entry: list[tirx.Stmt] = []
        written: list = []
        tvm_ffi.structural_walk(
            loop.body, (tirx.BufferStore, lambda store: written.append(store.buffer))
        )

        def take(name: str, type_: Any, argument: Any) -> Var:
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
        captured, end = list(parameters), 0
        large, body = _without_large_buffers(loop.body)
        for variable in large:
            self.offsets.append(end)
            end += -(-num_heap_bytes(variable) // _LINE) * _LINE + _GAP
            pointer = PointerType(variable.ty.dtype, variable.ty.storage_scope)
            parameters.append(Var(f"{variable.name}_data", pointer))
            entry.append(tirx.DeclBuffer(variable, data=parameters[-1]))
        self.num_bytes = -(-end // _PAGE) * _PAGE
        # The code generator ends the function with `return 0`.
        body = tirx.SeqStmt([*entry, body])
        for data in captured:
            if isinstance(data.ty, PointerType):  # or LLVM assumes vector alignment
                alignment = tirx.const(data.ty.element_type.dtype.itemsize, "int32")
                body = tirx.AttrStmt(data, "storage_alignment", alignment, body)
        self.scalars = scalars
        parameters = [loop.loop_var, *parameters, *scalars]
        function = tirx.PrimFunc(parameters, body, ret_type=PrimType("int32"))
        self.function = function.with_attr("tirx.noalias", True)

    def call(self, name: GlobalVar, task: Any) -> tirx.AssertStmt:
        """Emit a call. The function returns nonzero if it could not allocate a buffer."""
        first = tirx.Cast("int64", task) * tirx.const(self.num_bytes, "int64")
        buffers = [tirx.handle_add_byte_offset(self.memory, first + n) for n in self.offsets]
        arguments = [task, *self.arguments, *buffers, *self.scalars]
        result = Call(name, arguments, ret_ty=PrimType("int32"))
        return _require(result == 0)

    def with_memory(self, loop: tirx.Stmt, num_tasks: Any) -> tirx.Stmt:
        """Emit the loop between the allocation of the buffers of its tasks and their release."""
        if self.num_bytes == 0:
            return loop
        num_bytes = tirx.Cast("int64", num_tasks) * tirx.const(self.num_bytes, "int64")
        return tirx.SeqStmt(
            [
                tirx.Bind(self.memory, allocate(num_bytes, "uint8")),
                _require(tirx.Not(tirx.isnullptr(self.memory))),
                loop,
                tirx.Evaluate(release(self.memory)),
            ]
        )


def _without_large_buffers(body: tirx.Stmt) -> tuple[list[Var], tirx.Stmt]:
    """Take the allocations of buffers that are too large for the stack out of a statement."""
    large: list[Var] = []

    def take(allocation: tirx.AllocBuffer, mutator: Any) -> Any:
        if num_heap_bytes(allocation.buffer) == 0:
            return mutator.default_mutate(allocation)
        large.append(allocation.buffer)
        return tirx.Evaluate(0)

    return large, tvm_ffi.structural_mutate(body, (tirx.AllocBuffer, take))


def _require(condition: Any) -> tirx.AssertStmt:
    message = StringImm("no memory for the buffers of a task")
    return tirx.AssertStmt(condition, StringImm("RuntimeError"), [message])


def num_heap_bytes(variable: Var) -> int:
    """Return the bytes of a buffer that TVM would not put on the stack; 0 for others."""
    buffer = variable.ty
    if str(buffer.storage_scope) not in ("", "global"):
        return 0
    num_bytes = tvm.DataType(str(buffer.dtype)).itemsize
    for extent in buffer.shape:
        if not isinstance(extent, tirx.IntImm):
            return 0
        num_bytes *= int(extent)
    return num_bytes if num_bytes >= _MIN_HEAP_BYTES else 0
