# SPDX-License-Identifier: Apache-2.0
"""The tasks of a kernel: how many there are, who does what, and memory for what is large.

Tasks run on the threads of the pool. Compiled code asks `TVMBackendAllocWorkspace` for what is too
large for the stack. While a cache of ours calls, the runtime lends memory of the cache instead of
TVM's pool: `runtime_ext/step/scratch.h`.
"""

from collections.abc import Sequence

import tvm
from tvm.ir import PointerType, PrimType
from tvm.script import tirx as T

from ..script import inline
from .isa.simd import F32, index_temp, wide_temp

TASK_LOOP = "pagedkv.task_loop"  # annotates a parallel loop over tasks
# A launch costs 1 us hot and up to 50 us when the workers sleep, so small work must not pass
# through the pool at all: where `compiler.lowering` finds this, a single task calls the body of
# the loop instead. ``for task in T.parallel(num_tasks, annotations=TASKS)``
TASKS = {TASK_LOOP: 1}

# linkonce_odr: several kernels of one module may bring the helper.
_TAKE = """
define linkonce_odr i64 @pagedkv_take_item(ptr %next) #0 {
  %item = atomicrmw add ptr %next, i64 1 monotonic
  ret i64 %item
}
attributes #0 = { alwaysinline nounwind }
"""
_LINE = 8  # counters of a cache line

ALLOCATE, RELEASE = "TVMBackendAllocWorkspace", "TVMBackendFreeWorkspace"
_CPU = (1, 0)  # type and number of the device
_TYPE_CODES = {"int32": 0, "uint8": 1, F32: 2}  # of DLPack
_HUGE = (1 << 31) - 1  # a shape for the indices only


def num_threads():
    """Return the number of threads of TVM's pool, asked for once per call (0.1 us)."""
    return index_temp(T.call_packed("runtime.NumThreads"))


def cut(total, task, num_tasks, dtype: str = "int32"):
    """First of `total` items that `task` does, of the type that `total` has.

    The product is of 64 bits: the totals of a batch may need more than 40, and tasks are few.
    """
    wide = T.cast(total, "int64") * T.cast(task, "int64") // T.cast(num_tasks, "int64")
    return T.cast(wide, dtype)


@T.meta_class
class Splits:
    """Items cut into splits for a `Queue`: a large one for each task, then smaller ones.

    So there are few cuts, and yet the last splits are small.

    Parameters
    ----------
    total : int64 expression
        The items.
    num_tasks : int32 expression
    """

    ROUNDS = 4
    SHIFT = 2  # every round leaves a quarter

    def __init__(self, total, num_tasks):
        self.total, self.num_tasks = total, num_tasks
        self.rounds = T.local_scalar("int32")

    @inline
    def begin(self, min_items):
        """Choose how many there are: of `min_items`, if that is one for each task."""
        minimum = T.cast(self.num_tasks, "int64") * min_items
        self.rounds = 1
        for _ in range(self.ROUNDS - 1):
            if self._left(self.rounds) >= minimum:
                self.rounds += 1

    @property
    def count(self):
        """Return their number."""
        return self.rounds * self.num_tasks

    def first_item(self, split_id):
        """The first item of a split; that of the split after the last one is `total`."""
        before = index_temp(split_id // self.num_tasks)
        left, after = (
            wide_temp(T.if_then_else(n < self.rounds, self._left(n), T.int64(0)))
            for n in (before, before + 1)
        )
        offset = cut(left - after, split_id - before * self.num_tasks, self.num_tasks, "int64")
        return wide_temp(self.total - left + offset)

    def _left(self, rounds):
        """Items that are left after some rounds."""
        return T.shift_right(self.total, T.cast(rounds * self.SHIFT, "int64"))


@T.meta_class
class Queue:
    """Work items that tasks take one after another, so that they finish together.

    It is made before the tasks begin, where `llvm_helper` is known. A task does::

        item = queue.take()
        while item < num_items:
            ...
            item = queue.take()
    """

    llvm_helper = _TAKE

    def __init__(self):
        # Alone in a cache line. (A buffer of one number would be passed to the tasks by value.)
        self.next = T.alloc_buffer((_LINE,), "int64")

    @inline
    def begin(self):
        """Begin with item 0."""
        self.next[0] = T.int64(0)

    def take(self):
        """Return the next item, int64; to be assigned to a variable."""
        return T.call_extern("int64", "pagedkv_take_item", T.address_of(self.next[0]))


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
