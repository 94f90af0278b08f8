# SPDX-License-Identifier: Apache-2.0
"""Memory that a kernel takes while it runs, for what is too large for the stack.

Compiled code asks `TVMBackendAllocWorkspace` for it. While a cache of ours calls, the runtime lends
memory of the cache instead of TVM's pool: `runtime_ext/step/scratch.h`.
"""

from collections.abc import Sequence

import tvm
from tvm.ir import PointerType, PrimType
from tvm.script import tirx as T

from .isa.simd import F32

ALLOCATE, RELEASE = "TVMBackendAllocWorkspace", "TVMBackendFreeWorkspace"
_CPU = (1, 0)  # type and number of the device
_TYPE_CODES = {"int32": 0, "uint8": 1, F32: 2}  # of DLPack
_HUGE = (1 << 31) - 1  # a shape for the indices only


def allocate(num_bytes, dtype: str):
    """Return the expression that takes memory, an int64 number of bytes; null if there is none."""
    return T.call_extern(
        PointerType(PrimType(dtype)),
        ALLOCATE,
        *(T.int32(n) for n in _CPU),
        T.cast(num_bytes, "uint64"),
        T.int32(_TYPE_CODES[dtype]),
        T.int32(8 * tvm.DataType(dtype).itemsize),
    )


def release(data):
    """Return the expression that gives memory back, at the end of a kernel."""
    return T.call_extern("int32", RELEASE, *(T.int32(n) for n in _CPU), data)


class Workspace:
    """Numbers ``[count, *shape]``; pages that nobody writes are never mapped.

    Its size may be decided by the call, unlike those of a kernel's buffers.

    Parameters
    ----------
    count : int32 expression
    shape : sequence of int
    dtype : {"float32", "int32"}
    what : str
        What is kept in it, for the error.

    Attributes
    ----------
    buffer : Buffer
        Indices are int64: the caller casts the first one.
    """

    def __init__(self, count, shape: Sequence[int], dtype: str = F32, what: str = "partial states"):
        num_bytes = T.cast(count, "int64") * 4
        for extent in shape:
            num_bytes = num_bytes * extent
        self.data = T.bind(allocate(num_bytes, dtype), PointerType(PrimType(dtype)))
        is_allocated = T.Not(T.isnullptr(self.data))
        with T.Assert(is_allocated, f"no memory for the {what}", "RuntimeError"):
            T.evaluate(0)
        self.buffer = T.decl_buffer((T.int64(_HUGE), *shape), dtype, data=self.data)

    def free(self) -> None:
        """Give it back; to be called at the end of the kernel."""
        T.evaluate(release(self.data))
