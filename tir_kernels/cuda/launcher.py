# SPDX-License-Identifier: Apache-2.0
"""Queries of launchers to the CUDA runtime, by C functions of `compiler.cuda.runtime`."""

from __future__ import annotations

from contextlib import contextmanager

import tvm
from tvm import tirx
from tvm.script import tirx as T
from tvm.script.ir_builder import IRBuilder

from .emit import F32, I32

TAKE, GIVE_BACK = "pagedkv_take_workspace", "pagedkv_return_workspace"
RESIDENT_BLOCKS = "pagedkv_resident_blocks"
BLOCK_SHARED_BYTES = "pagedkv_block_shared_bytes"


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
    """Shared memory that a block may have on the device, in bytes; the same in all calls."""
    return tirx.call_extern(I32, BLOCK_SHARED_BYTES)


def resident_blocks(shared_bytes: int, max_per_sm: int, num_slices: int = 1):
    """Blocks that the whole GPU holds at a time, at least one; the same in all calls.

    Parameters
    ----------
    shared_bytes : int
        Of a block.
    max_per_sm : int
        Blocks for which a multiprocessor has registers.
    num_slices : int
        Blocks that take slices of the same rows, and count as one.
    """
    resident = tirx.call_extern(I32, RESIDENT_BLOCKS, T.int64(shared_bytes), T.int32(max_per_sm))
    number = T.max(T.truncdiv(resident, num_slices), 1)
    return T.bind(number, var=tirx.Var("num_blocks", I32))
