# SPDX-License-Identifier: Apache-2.0
"""How a kernel divides its work among the threads of TVM's pool."""

from __future__ import annotations

from collections.abc import Callable

from tvm.script import tirx as T

from .simd import Register, index_temp

TASK_LOOP = "pagedkv.task_loop"  # annotates the parallel loop of `for_tasks`

# linkonce_odr: several kernels of one module may bring the helper.
_TAKE = """
define linkonce_odr i32 @pagedkv_take_unit(ptr %next) #0 {
  %unit = atomicrmw add ptr %next, i32 1 monotonic
  ret i32 %unit
}
attributes #0 = { alwaysinline nounwind }
"""
_LINE = 16  # counters of a cache line


def num_threads():
    """Threads of TVM's pool, asked for once per call (0.1 us)."""
    return index_temp(T.call_packed("runtime.NumThreads"))


def cut(total, task, num_tasks):
    """First of `total` units that `task` does; 64 bits, because the product may not fit 32."""
    wide = T.cast(total, "int64") * T.cast(task, "int64") // T.cast(num_tasks, "int64")
    return T.cast(wide, "int32")


def for_tasks(num_tasks, body: Callable) -> None:
    """Emit ``body(task)`` for every task, in parallel when there is more than one.

    The body is emitted twice: a launch costs 1 us hot and up to 50 us when the workers sleep, so
    small work must not pass through the pool at all. The loop is annotated, for a compiler that
    makes one function of both.
    """
    with T.If(num_tasks > 1):
        with T.Then():
            with T.parallel(num_tasks, annotations={TASK_LOOP: 1}) as task:
                body(task)
        with T.Else():
            body(T.int32(0))


class Pieces:
    """`total` units in pieces for a `Queue`: a large one for each task, then ever smaller ones.

    So there are few cuts, and yet the last pieces are small.

    Parameters
    ----------
    total, num_tasks : int32 expressions
    most : int
        Pieces; at least as many as there may be tasks.
    least : int32 expression
        Units of a piece, where there are enough for one of each task.
    """

    ROUNDS = 4
    SHIFT = 2  # every round leaves a quarter

    def __init__(self, total, num_tasks, *, most: int, least: int):
        self.total, self.num_tasks = total, num_tasks
        self.rounds = Register(1, "int32", T.int32(1))
        with T.serial(self.ROUNDS - 1):
            rounds = self.rounds.get()
            is_large = T.shift_right(total, rounds * self.SHIFT) >= num_tasks * least
            with T.If(T.And(is_large, (rounds + 1) * num_tasks <= most)), T.Then():
                self.rounds.set(rounds + 1)

    @property
    def count(self):
        """How many there are."""
        return self.rounds.get() * self.num_tasks

    def begin(self, piece):
        """The first unit of a piece, and of the piece after the last one the end of them all."""
        before = index_temp(piece // self.num_tasks)
        left, after = (
            index_temp(
                T.if_then_else(n < self.rounds.get(), T.shift_right(self.total, n * self.SHIFT), 0)
            )
            for n in (before, before + 1)
        )
        place = cut(left - after, piece - before * self.num_tasks, self.num_tasks)
        return index_temp(self.total - left + place)


class Queue:
    """Units of work that tasks take one after another, so that they finish together.

    To be made before the tasks begin, all of whose `for_units` are within its `scope`.
    """

    def __init__(self):
        # Alone in a cache line. (A buffer of one number would be passed to the tasks by value.)
        self.next = T.alloc_buffer((_LINE,), "int32")
        T.buffer_store(self.next, T.int32(0), [0])

    @staticmethod
    def scope():
        """Where tasks may take units."""
        return T.attr(T.int32(0), "pragma_import_llvm", _TAKE)

    def for_units(self, num_items, num_units: Callable, body: Callable) -> None:
        """Emit ``body(item, unit)`` for the units that this task takes, in their order.

        Parameters
        ----------
        num_items : int32 expression
        num_units : ``item -> int32 expression``, of the units that an item has.
        """

        def take():
            address = T.address_of(self.next[0])
            return T.call_extern("int32", "pagedkv_take_unit", address)

        taken = Register(1, "int32", take())
        before = Register(1, "int32", T.int32(0))  # units of earlier items
        with T.serial(num_items) as item:
            end = index_temp(before.get() + num_units(item))
            with T.While(taken.get() < end):
                body(item, index_temp(taken.get() - before.get()))
                taken.set(take())
            before.set(end)
