# SPDX-License-Identifier: Apache-2.0
"""Finish times of the threads of a kernel, by a clock that the kernel itself reads.

The time that a thread's CPU is busy would tell nothing: threads of the pool spin while they wait.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence

import numpy as np
import tvm
import tvm_ffi
from tvm import tirx
from tvm.script import tirx as T

from tir_kernels.cpu.tasks import TASK_LOOP


def stamped(kernel: tirx.PrimFunc) -> tirx.PrimFunc:
    """The same kernel with one argument more: int64 ``[num_tasks, 2]``, cycles.

    A task writes when it begins and when it ends.
    """
    stamps = tirx.decl_buffer((tirx.Var("num_stamps", "int32"), 2), "int64", "stamps")

    def stamp(loop: tirx.For, mutator):
        if TASK_LOOP not in loop.annotations:
            return mutator.default_mutate(loop)
        begin, end = (
            tirx.BufferStore(
                stamps, T.call_llvm_intrin("int64", "llvm.readcyclecounter"), [loop.loop_var, i]
            )
            for i in range(2)
        )
        body = tirx.SeqStmt([begin, loop.body, end])
        fields = (loop.loop_var, loop.min, loop.extent, loop.kind, body)
        return tirx.For(*fields, annotations=loop.annotations)

    body = tvm_ffi.structural_mutate(kernel.body, (tirx.For, stamp))
    made = tirx.PrimFunc([*kernel.params, stamps], body, kernel.ret_type)
    return made.with_attrs(kernel.attrs)


def apart(kernel: Callable, arguments: Sequence, before: Callable, num_threads: int) -> float:
    """Return how long the first thread waits for the last one, as a share of the whole time.

    The median of 21 runs, each after `before`; 0 where only one thread works.
    """
    shares = []
    for _ in range(21):
        stamps = tvm.runtime.tensor(np.zeros((num_threads, 2), np.int64))
        before()
        kernel(*arguments, stamps)
        begin, end = (each[each > 0] for each in stamps.numpy().T)
        shares.append((end.max() - end.min()) / max(end.max() - begin.min(), 1))
    return statistics.median(shares)
