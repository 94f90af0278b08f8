# SPDX-License-Identifier: Apache-2.0
"""Memory of a call whose size the call itself decides.

Buffers of a kernel have constant sizes: TVM allocates them first of all, before anything is known.
"""

from __future__ import annotations

from collections.abc import Sequence

from tvm.ir import PointerType, PrimType
from tvm.script import tirx as T

from ..simd import F32

_CPU = (1, 0)  # type and number of the device
_FLOAT = 2  # type code of DLPack
_HUGE = (1 << 31) - 1  # a shape for the indices only


class Workspace:
    """float32 ``[count, *shape]``, from TVM's pool; pages that nobody writes are never mapped.

    Parameters
    ----------
    count : int32 expression
    shape : sequence of int

    Attributes
    ----------
    buffer : Buffer
        Indices are int64: the caller casts the first one.
    """

    def __init__(self, count, shape: Sequence[int]):
        num_bytes = T.cast(count, "int64") * 4
        for extent in shape:
            num_bytes = num_bytes * extent
        pointer = PointerType(PrimType(F32))
        self.data = T.bind(
            T.call_extern(
                pointer,
                "TVMBackendAllocWorkspace",
                *(T.int32(n) for n in _CPU),
                T.cast(num_bytes, "uint64"),
                T.int32(_FLOAT),
                T.int32(32),
            ),
            pointer,
        )
        is_allocated = T.Not(T.isnullptr(self.data))
        with T.Assert(is_allocated, "no memory for the partial states", "RuntimeError"):
            T.evaluate(0)
        self.buffer = T.decl_buffer((T.int64(_HUGE), *shape), F32, data=self.data)

    def free(self) -> None:
        """Give it back; to be called at the end of the kernel."""
        T.evaluate(
            T.call_extern(
                "int32", "TVMBackendFreeWorkspace", *(T.int32(n) for n in _CPU), self.data
            )
        )
