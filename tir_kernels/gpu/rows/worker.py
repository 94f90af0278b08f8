# SPDX-License-Identifier: Apache-2.0
"""Workers of kernels that move rows: the threads of a block do an item of work."""

from __future__ import annotations

from collections.abc import Sequence

from tvm.script import tirx as T
from tvm.script.ir_builder import IRBuilder

from ...define import ACCESS_BYTES
from ...script import opened
from ...spec import ITEMSIZE, KernelSpec
from ..isa import isa_of
from ..registers import F32, I32, WARP, Registers, index_temp

THREADS = 128
WARPS = THREADS // WARP
# Blocks of a multiprocessor, which then has enough loads in flight, by the size of an element.
MIN_BLOCKS = {2: 10, 4: 8}
MAXIMUM_THREADS = 512


@T.meta_class
class Worker:
    """The threads of a block. It does one item, so nothing in shared memory is used twice.

    Parameters
    ----------
    spec : KernelSpec
    computed : sequence of buffers
        Those with rows that are blended.
    """

    lanes = 1

    def __init__(self, spec: KernelSpec, computed: Sequence = ()):
        self.spec, self.computed = spec, computed
        self.isa = self.arithmetic = isa_of(spec.target)
        self.thread = self.shared = None

    def items(self, count, item_bytes):
        """Launch a block for each of the items, which do not depend on each other."""
        blocks = T.cast(count, "int32")
        min_blocks = 0 if self.spec.codec else MIN_BLOCKS[ITEMSIZE[self.spec.dtype]]
        (block,), self.thread = opened(self.isa.launch([blocks], THREADS, min_blocks))
        if self.spec.codec is not None and self.spec.codec.bits == 4:
            # Cosines and sines, and after them the row that each warp quantizes.
            size = max(1, self.spec.rope.rotary_dim // 2)
            self.shared = self._table(2 - (-WARPS * self.spec.qk_head_dim // size), size)
        item = self.isa.wide(block)
        opened(T.If(item < self.isa.wide(count)))
        opened(T.Then())
        return T.serial(item, item + 1)

    def sync(self) -> None:
        """Let all threads see what the others wrote."""
        self.isa.sync_block()

    def table(self, rows: int, size: int):
        """Return a float32 array ``[rows, size]`` in shared memory; a block can have one."""
        return self._table(rows, size) if self.shared is None else self.shared

    def _table(self, rows: int, size: int):
        table = T.alloc_buffer((rows, size), F32, scope=self.isa.shared_scope, align=ACCESS_BYTES)
        return IRBuilder.name("table", table)

    def elements(self, size: int):
        """Loop over elements, which the threads share."""
        return T.serial(self.thread, size, step=THREADS)

    def rest(self, size: int) -> int:
        """Return how many elements lie past whole vectors: a thread takes one at a time."""
        return 0

    def lane(self):
        """Return the thread's number in its warp."""
        return index_temp(T.truncmod(self.thread, WARP))

    def warp_rows(self, count):
        """Loop over rows that the warps take."""
        return T.serial(T.truncdiv(self.thread, WARP), T.cast(count, "int32"), step=WARPS)

    def warp_scratch(self) -> tuple:
        """Return room for a row of values of the thread's warp: a table, and where it begins."""
        begin = 2 * max(1, self.spec.rope.rotary_dim // 2)
        warp = T.truncdiv(self.thread, WARP)
        return self.shared, index_temp(begin + warp * self.spec.qk_head_dim)

    def largest(self, values, count):
        """Return the largest of `count` int32 values, at least -1.

        A kernel of one block finds it for all blocks of the next one: each of them would look at
        all values, and there is one for each value.
        """
        found = opened(self.isa.workspace((1,), "largest"))
        num_threads = min(MAXIMUM_THREADS, self.spec.target.max_threads)
        with self.isa.launch([1], num_threads) as (_, thread):
            num_warps = num_threads // WARP
            of_warps = T.alloc_buffer((num_warps,), "int32", scope=self.isa.shared_scope)
            largest = Registers(1, I32, "x")
            largest[0] = T.int32(-1)
            lane = index_temp(T.truncmod(thread, WARP))

            def combine() -> None:
                for mask in (1, 2, 4, 8, 16):
                    largest[0] = T.max(largest[0], self.isa.shuffle_xor(largest[0], mask))

            with T.serial(thread, T.cast(count, "int32"), step=num_threads) as i:
                largest[0] = T.max(largest[0], values[i])
            combine()
            with T.If(lane == 0), T.Then():
                T.buffer_store(of_warps, largest[0], [T.truncdiv(thread, WARP)])
            self.isa.sync_block()
            largest[0] = of_warps[T.truncmod(lane, num_warps)]
            combine()
            with T.If(thread == 0), T.Then():
                T.buffer_store(found, T.reinterpret(F32, largest[0]), [0])
        return T.reinterpret("int32", found[0])


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
        self.size = min(THREADS, -(-num_runs // turns))  # of a team
        self.count = max(1, THREADS // self.size)

    def _busy(self, turns: int) -> float:
        """Return which part of the threads has something to do."""
        size = -(-self.num_runs // turns)
        return THREADS // size * self.num_runs / (THREADS * turns)

    def rows(self, count):
        """Loop over the rows of a team."""
        team = T.truncdiv(self.worker.thread, self.size)
        if isinstance(count, int) and count <= self.count:
            is_taken = T.if_then_else(team < count, 1, 0)
            return T.serial(team, team + (is_taken if count * self.size < THREADS else 1))
        count = T.cast(count, "int32")
        if self.size * self.count < THREADS:
            team = T.if_then_else(team < self.count, team, count)
        return T.serial(team, count, step=self.count)

    def runs(self, num_runs: int):
        """Loop over the runs of a row that the thread takes."""
        first = T.truncmod(self.worker.thread, self.size)
        if num_runs == self.size:
            return T.serial(first, first + 1)
        return T.serial(first, num_runs, step=self.size)
