# SPDX-License-Identifier: Apache-2.0
"""States of work that was cut: parts of O with their lse, in a workspace, and their merge."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import contextmanager

from tvm.script import tirx as T

from ..cpu.blend import selected
from ..spec import KernelSpec
from . import scalars
from .elements import load_floats, store_floats
from .emit import F32, WARP, Registers, index_temp, launch
from .launcher import workspace
from .scalars import exp2, log2, temp
from .warp import shuffle_xor

LOWEST = -3.0e38  # finite, so that -inf less it is no NaN
RUN = 8  # elements that a thread takes at once
_ROWS = 4  # of a block that merges: a warp for each
_MIN_BLOCKS = 4  # of these on a multiprocessor: 128 registers


def weigh(logs: Registers):
    """Turn the lse of parts into their weights; returns the lse of all."""
    top, total = Registers(1, F32, "top"), Registers(1, F32, "total")
    top[0] = T.float32(LOWEST)
    for i in range(logs.count):
        top[0] = T.max(top[0], logs[i])
    total[0] = T.float32(0)
    for i in range(logs.count):
        logs[i] = exp2(logs[i] - top[0])
        total[0] = total[0] + logs[i]
    lse, inverse = lse_of(top[0], total[0])
    for i in range(logs.count):
        logs[i] = logs[i] * inverse
    return lse


def lse_of(top, total):
    """The lse of a maximum and the sum of exponentials less it, and the sum's inverse."""
    has_some = total > T.float32(0.5)  # that of the maximum itself is 1
    empty = T.reinterpret(F32, T.uint32(0xFF800000))
    lse = temp(T.if_then_else(has_some, top + log2(total), empty))
    return lse, temp(T.if_then_else(has_some, T.float32(1) / total, T.float32(0)))


class Partials:
    """Room for two states of each block: of what its first and its last unit belong to.

    Parameters
    ----------
    spec : KernelSpec
    num_blocks : int32 expression
        That share the units.
    num_rows : int, optional
        Of a state; None: the query heads of a KV head.
    goes_on : bool
        The outputs hold another part of their rows, to be merged with.
    """

    def __init__(
        self, spec: KernelSpec, num_blocks, num_rows: int | None = None, goes_on: bool = False
    ):
        self.spec, self.num_blocks, self.goes_on = spec, num_blocks, goes_on
        self.num_rows = num_rows or spec.group_size
        # The lse comes behind the row, and what keeps the rows aligned.
        self.shape = (2 * num_blocks, self.num_rows, spec.v_head_dim + RUN)
        self.buffer = None

    @contextmanager
    def allocated(self):
        """Launches within may use them."""
        with workspace(self.shape, "partial_states") as self.buffer:
            yield

    def slot(self, block, is_first):
        """Of what goes on from the block before, or of what goes on behind."""
        return block * 2 + T.if_then_else(is_first, 0, 1)

    def put(self, slot, row, column, values: Registers) -> None:
        """Keep elements of a row of a state."""
        store_floats(self.buffer, (slot, row, column), values)

    def put_lse(self, slot, row, lse) -> None:
        """Keep the lse of a row."""
        T.buffer_store(self.buffer, lse, [slot, row, self.spec.v_head_dim])

    def launch_merge(self, a, split_of: Callable, clears_empty: bool = False) -> None:
        """Merge what was cut.

        Parameters
        ----------
        a : the kernel's arguments.
        split_of : callable
            Emits how the units were cut, such as a `PageSplit`; takes the lane.
        clears_empty : bool
            Also clear the rows of sequences without pages, of which there is one each.
        """
        grid = [self.num_blocks, -(-self.num_rows // _ROWS)]
        with launch(grid, _ROWS * WARP, _MIN_BLOCKS) as ((block, rows), thread):
            lane = index_temp(T.truncmod(thread, WARP))
            row = index_temp(rows * _ROWS + T.truncdiv(thread, WARP))
            split = split_of(lane)
            # The block that has the first unit, but not the last one, tells where it was cut.
            cut = index_temp((block + 1) * split.share)
            with T.If(T.And(cut < split.total, row < self.num_rows)), T.Then():
                work = split.pair(split.owner(cut, lane), cut)
                begins_here = T.And(work.begin < cut, work.begin >= cut - split.share)
                with T.If(T.And(begins_here, work.is_there(row))), T.Then():
                    last_block = T.truncdiv(work.end - 1, split.share)
                    count = index_temp(last_block - block + 1)
                    self._merge(a, block, count, row, work.output_row(row), lane)
            if clears_empty:
                self._clear_empty(a, block, row, lane)

    def _merge(self, a, block, count, row, output, lane) -> None:
        width = self.spec.v_head_dim

        def slot_of(i):
            return self.slot(block + i, i > 0)

        def lse_at(i):
            return self.buffer[slot_of(i), row, width]

        top, total = Registers(1, F32, "top"), Registers(1, F32, "total")
        top[0], total[0] = T.float32(LOWEST), T.float32(0)
        if self.goes_on:
            before = temp(a.lse[output])
            top[0] = T.max(top[0], before)

        def for_own(body):
            with T.serial(T.ceildiv(count, WARP)) as turn:
                i = index_temp(turn * WARP + lane)
                with T.If(i < count), T.Then():
                    body(i)

        def raise_top(i):
            top[0] = T.max(top[0], lse_at(i))

        def add(i):
            total[0] = total[0] + exp2(lse_at(i) - top[0])

        for_own(raise_top)
        for mask in (1, 2, 4, 8, 16):
            top[0] = T.max(top[0], shuffle_xor(top[0], mask))
        for_own(add)
        for mask in (1, 2, 4, 8, 16):
            total[0] = total[0] + shuffle_xor(total[0], mask)
        if self.goes_on:
            before = temp(exp2(before - top[0]))
            total[0] = total[0] + before
        lse, inverse = lse_of(top[0], total[0])
        with T.If(lane == 0), T.Then():
            T.buffer_store(a.lse, lse, list(output))
        sums = Registers(RUN, F32, "sums")
        with T.serial(-(-width // (RUN * WARP))) as turn:
            column = index_temp((turn * WARP + lane) * RUN)
            with T.If(column < width), T.Then():
                sums.fill(T.float32(0))
                if self.goes_on:
                    o = load_floats(a.o, (*output, column), RUN)
                    for e in range(RUN):
                        sums[e] = selected(o[e], temp(before * inverse), 1, scalars)
                with T.serial(count) as i:
                    slot = index_temp(slot_of(i))
                    weight = temp(exp2(self.buffer[slot, row, width] - top[0]) * inverse)
                    part = load_floats(self.buffer, (slot, row, column), RUN)
                    for e in range(RUN):
                        sums[e] = sums[e] + weight * part[e]
                store_floats(a.o, (*output, column), sums)

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
                        with T.serial(-(-spec.v_head_dim // (RUN * WARP))) as part:
                            column = index_temp((part * WARP + lane) * RUN)
                            with T.If(column < spec.v_head_dim), T.Then():
                                store_floats(a.o, (b, head, column), zeros)
