# SPDX-License-Identifier: Apache-2.0
"""Workers of kernels that move rows: the threads of a block do an item of work."""

from __future__ import annotations

import functools
from collections.abc import Sequence

from tvm.script import tirx as T

from ...script import inline, opened
from ...semantics.partial_states import selected
from ...spec import KernelSpec
from .. import scalars
from ..elements import ACCESS_BYTES, load_floats, run_length, store_floats
from ..emit import F32, Registers, launch, sync_block

THREADS = 128


@T.meta_class
class Worker:
    """The threads of a block. It does one item, so nothing in shared memory is used twice."""

    arithmetic = scalars
    lanes = 1

    def __init__(self, spec: KernelSpec):
        self.spec, self.thread = spec, None

    def items(self, count, item_bytes):
        """Launch a block for each of the items, which do not depend on each other."""
        blocks = T.cast(count, "int32")
        (block,), self.thread = opened(launch([blocks], THREADS))
        wide = (T.cast(x, "int64") for x in (block, count, T.max(blocks, 1)))
        first, end, step = wide
        return T.serial(first, end, step=step)

    def sync(self) -> None:
        """Let all threads see what the others wrote."""
        sync_block()

    def table(self, rows: int, size: int):
        """Allocate a float32 array ``[rows, size]`` in shared memory."""
        return T.alloc_buffer((rows, size), F32, scope="shared.dyn", align=ACCESS_BYTES)

    def elements(self, size: int):
        """Loop over elements, which the threads share."""
        return T.serial(self.thread, size, step=THREADS)

    def rest(self, size: int) -> int:
        """Return how many elements lie behind whole vectors: a thread takes one at a time."""
        return 0


@T.meta_class
class Teams:
    """Threads of a block in teams, which share the rows of an item.

    Parameters
    ----------
    worker : Worker
    num_runs : int
        Runs of elements of a row; a thread of a team takes one at a time.
    """

    def __init__(self, worker: Worker, num_runs: int):
        self.worker, self.num_runs = worker, num_runs
        turns = min(range(1, 9), key=lambda n: (-round(self._busy(n), 1), n))
        self.size = -(-num_runs // turns)  # of a team
        self.count = max(1, THREADS // self.size)

    def _busy(self, turns: int) -> float:
        """Return which part of the threads has something to do."""
        size = -(-self.num_runs // turns)
        return THREADS // size * self.num_runs / (THREADS * turns)

    def rows(self, count):
        """Loop over the rows of a team."""
        team, count = T.truncdiv(self.worker.thread, self.size), T.cast(count, "int32")
        if self.size * self.count < THREADS:
            team = T.if_then_else(self.worker.thread < self.size * self.count, team, count)
        return T.serial(team, count, step=self.count)

    def runs(self, num_runs: int):
        """Loop over the runs of a row that the thread takes."""
        return T.serial(T.truncmod(self.worker.thread, self.size), num_runs, step=self.size)


@T.meta_class
class RowBlend:
    """Sums rows of some buffers times their weights into the row of the first one.

    Parameters
    ----------
    worker : Worker
    buffers : sequence of buffers whose last axis is the row.
    """

    def __init__(self, worker: Worker, buffers: Sequence):
        width = int(buffers[0].shape[-1])
        self.buffers, self.length = buffers, run_length(width)
        self.teams = Teams(worker, width // self.length)

    def rows(self, count):
        """Loop over the rows of an item, which teams of threads share."""
        return self.teams.rows(count)

    @inline
    def blend(self, index, weights):
        """Blend the rows at `index`."""
        for run in self.teams.runs(self.teams.num_runs):
            self._blend_run((*index, run * self.length), weights)

    def _blend_run(self, index, weights: Sequence) -> None:
        loaded = [load_floats(buffer, index, self.length) for buffer in self.buffers]
        values = Registers(self.length, F32, "blended")
        for e in range(self.length):
            terms = [
                selected(x[e], weight, 1, scalars)
                for x, weight in zip(loaded, weights, strict=True)
            ]
            values[e] = functools.reduce(lambda a, b: a + b, terms)
        store_floats(self.buffers[0], index, values)
