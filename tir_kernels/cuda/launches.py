# SPDX-License-Identifier: Apache-2.0
"""Launches of kernels, and what launchers ask the CUDA runtime for.

They call C functions of `compiler.cuda.runtime`.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import contextmanager, nullcontext

import tvm
from tvm import tirx
from tvm.script import tirx as T
from tvm.script.ir_builder import IRBuilder

from ..gpu.registers import F32, I32

TAKE, GIVE_BACK = "pagedkv_take_workspace", "pagedkv_return_workspace"
RESIDENT_BLOCKS = "pagedkv_resident_blocks"
BLOCK_SHARED_BYTES = "pagedkv_block_shared_bytes"


@contextmanager
def launch(grid: Sequence, num_threads: int, min_blocks: int = 0, waits: bool = True):
    """Launch a kernel; see `Isa.launch`.

    From compute capability 9.0 on, blocks may start before the previous kernel has ended. The int32
    arrays of a step can be read at once: they are copied before the first kernel that reads them,
    and a copy, unlike a kernel, has ended when the next operation of its stream begins.
    """
    with T.attr(0, "tirx.device_entry", True):
        # Or the compiler takes `block < extent` for certain.
        blocks = T.cta_id([e if isinstance(e, int) else T.max(e, 1) for e in grid])
        thread = T.thread_id([num_threads])
        bound = T.attr(0, "tirx.launch_bounds_min_blocks_per_sm", min_blocks or 1)
        with bound if min_blocks else nullcontext():
            _control_grids("let_next_begin", "launch_dependents")
            if waits:
                wait_for_kernels_before()
            yield tuple(blocks) if len(grid) > 1 else (blocks,), thread


def wait_for_kernels_before() -> None:
    """Wait until the kernels before have ended, and all that they wrote can be seen."""
    _control_grids("wait_for_before", "wait")


def _control_grids(name: str, operation: str) -> None:
    """Emit ``griddepcontrol``, which chips before 9.0 have not."""
    source = (
        f"__device__ __forceinline__ void pagedkv_{name}() {{\n"
        "#if __CUDA_ARCH__ >= 900\n"
        f'  asm volatile("griddepcontrol.{operation};" ::: "memory");\n'
        "#endif\n"
        "}\n"
    )
    T.evaluate(T.cuda.func_call(f"pagedkv_{name}", source_code=source))


@contextmanager
def workspace(shape, name: str):
    """A float32 buffer in global memory, for the kernels that are launched within.

    The launcher takes it from and returns it to two C functions, in the order of the stream.
    """
    size = T.int64(4)
    for extent in shape:
        size = size * (T.int64(extent) if isinstance(extent, int) else T.cast(extent, "int64"))
    pointer = tvm.ir.PointerType(tvm.ir.PrimType(F32), "global")
    taken = tirx.call_extern(pointer, TAKE, size)
    data = T.bind(taken, var=tirx.Var(name, pointer))
    yield IRBuilder.name(name, T.decl_buffer(shape, F32, data=data, scope="global"))
    T.evaluate(tirx.call_extern("int32", GIVE_BACK, data))


def block_shared_bytes():
    """Ask for the shared memory that a block may have on the device, in bytes."""
    return tirx.call_extern(I32, BLOCK_SHARED_BYTES)


def resident_blocks(shared_bytes: int, max_per_sm: int, num_slices: int = 1):
    """Ask how many blocks the GPU holds at a time; see `Isa.resident_blocks`."""
    resident = tirx.call_extern(I32, RESIDENT_BLOCKS, T.int64(shared_bytes), T.int32(max_per_sm))
    number = T.max(T.truncdiv(resident, num_slices), 1)
    return T.bind(number, var=tirx.Var("num_blocks", I32))
