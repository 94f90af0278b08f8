# SPDX-License-Identifier: Apache-2.0
"""How a kernel divides its work among the threads of TVM's pool."""

from __future__ import annotations

from collections.abc import Callable

from tvm.script import tirx as T

from .simd import index_temp

TASK_LOOP = "pagedkv.task_loop"  # annotates the parallel loop of `for_tasks`


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
