# SPDX-License-Identifier: Apache-2.0
"""Partial states of work that is divided among blocks in a row: two per block, and their merge."""

from __future__ import annotations

from collections.abc import Callable

from tvm.script import tirx as T

from ...spec import KernelSpec
from ..elements import store_floats
from ..emit import F32, I32, WARP, Registers, as_count, count_temp, index_temp, launch
from .partial_states import MERGED_ROWS, MIN_BLOCKS_OF_MERGE, RUN, PartialStates


class BlockStates(PartialStates):
    """Room for two states of each block: of what its first and its last KV tile belong to.

    Parameters
    ----------
    spec : KernelSpec
    num_blocks : int32 expression
        That share the KV tiles.
    num_rows : int, optional
        Of a state; None: the query heads of a KV head.
    is_continued : bool
        As `PartialStates` takes it.
    """

    def __init__(
        self, spec: KernelSpec, num_blocks, num_rows: int | None = None, is_continued: bool = False
    ):
        self.num_blocks, self.num_rows = num_blocks, num_rows or spec.group_size
        super().__init__(spec, (2 * num_blocks, self.num_rows), is_continued)

    def slot(self, block, is_first):
        """Return the slot of the state that the block before began, or that the next one ends."""
        return block * 2 + T.if_then_else(is_first, 0, 1)

    def launch_merge(self, a, schedule_of: Callable, clears_empty: bool = False) -> None:
        """Merge what was cut.

        Parameters
        ----------
        a : the kernel's arguments.
        schedule_of : callable
            Emits how the KV tiles were cut, such as a `PageSchedule`; takes the lane.
        clears_empty : bool
            Also clear the rows of sequences without pages, of which there is one each.
        """
        grid = [self.num_blocks, -(-self.num_rows // MERGED_ROWS)]
        with launch(grid, MERGED_ROWS * WARP, MIN_BLOCKS_OF_MERGE) as ((block, rows), thread):
            lane = index_temp(T.truncmod(thread, WARP))
            row = index_temp(rows * MERGED_ROWS + T.truncdiv(thread, WARP))
            schedule = schedule_of(lane)
            # The block that has the first KV tile, but not the last one, tells where it was cut.
            cut = count_temp(as_count(block + 1) * schedule.split_size)
            with T.If(T.And(cut < schedule.total, row < self.num_rows)), T.Then():
                work = schedule.pair(schedule.owner(cut, lane), cut)
                begins_here = T.And(work.begin < cut, work.begin >= cut - schedule.split_size)
                with T.If(T.And(begins_here, work.has_row(row))), T.Then():
                    last_block = T.cast(T.truncdiv(work.end - 1, schedule.split_size), I32)
                    count = index_temp(last_block - block + 1)

                    def index_of(i):
                        return self.slot(block + i, i > 0), row

                    self.merge(a, index_of, count, work.output_row(row), lane)
            if clears_empty:
                self._clear_empty(a, block, row, lane)

    def _clear_empty(self, a, block, row, lane) -> None:
        spec = self.spec
        zeros = Registers(RUN, F32, "zeros")
        zeros.fill(T.float32(0))
        with T.serial(T.truncdiv(a.batch_size + self.num_blocks - 1, self.num_blocks)) as turn:
            b = index_temp(turn * self.num_blocks + block)
            with T.If(T.And(b < a.batch_size, row < spec.group_size)), T.Then():
                with T.If(a.page_indptr[b + 1] == a.page_indptr[b]), T.Then():
                    with T.serial(spec.num_kv_heads) as kv_head:
                        head = index_temp(kv_head * spec.group_size + row)
                        T.buffer_store(a.lse, T.reinterpret(F32, T.uint32(0xFF800000)), [b, head])
                        with T.serial(-(-spec.v_head_dim // (RUN * WARP))) as i:
                            column = index_temp((i * WARP + lane) * RUN)
                            with T.If(column < spec.v_head_dim), T.Then():
                                store_floats(a.o, (b, head, column), zeros)
