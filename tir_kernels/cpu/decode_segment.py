# SPDX-License-Identifier: Apache-2.0
"""One query row per head over a range of the positions of one sequence, for some of its KV heads.

Heads take turns block by block, so that a page is read from its begin to its end: neighbouring
heads lie side by side in it, and memory gives more when it is read in order (a fifth more, for
pages of 4 KiB a head).

A CPU drops prefetches while its queue of misses is full, and a line that was dropped costs the
whole latency when it is needed. So every line is asked for several times on its way: a turn ahead
(the same positions of the head that comes next), half a turn ahead (K's lines while V is read, and
V's while K is), and a few rows ahead. What is there already costs next to nothing.
"""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace

from tvm.script import tirx as T

from ..alibi import AlibiBias
from ..soft_cap import soft_cap
from ..softmax import HIDDEN, OnlineSoftmax
from ..spec import LOG2E, KernelSpec
from .columns import chunks, for_columns
from .rows import PagedRows, Tile
from .shuffles import reduce_each, widen
from .simd import (
    F32,
    Register,
    add,
    broadcast,
    constant,
    elements_per_line,
    index_temp,
    load,
    shuffle,
    store,
    temp,
)

BLOCK = 64  # positions of a softmax step
STATE_BYTES = 1 << 16  # of the rows of Q and O of a segment, which stay in L2
STRIP = 16  # rows of V that are read in all their columns before the next ones
SOON = 8  # positions between a line's last prefetch and its use


@dataclass(frozen=True)
class Blocking:
    """How the rows of a group and the positions of a block go through the registers.

    Parameters
    ----------
    rows : int
        Query heads whose accumulators are live at once.
    row_blocks : int
        Such sets in a group; the last one may be padded.
    positions : int
        Rows of K that are multiplied at once.
    vectors : int
        Vectors of an output row that are live at once.
    """

    rows: int
    row_blocks: int
    positions: int
    vectors: int

    @property
    def padded_rows(self) -> int:
        """Rows of the group's buffers."""
        return self.rows * self.row_blocks

    def most_members(self, spec: KernelSpec) -> int:
        """KV heads of a segment: all, or so many that parts of equal size hold no more state."""
        row_bytes = 4 * (spec.qk_head_dim + spec.v_head_dim)
        most = max(1, STATE_BYTES // (row_bytes * self.padded_rows))
        return -(-spec.num_kv_heads // -(-spec.num_kv_heads // most))

    @staticmethod
    def of(spec: KernelSpec) -> Blocking:
        """Choose for a spec."""
        most_rows, accumulators = (8, 16) if spec.target.registers >= 32 else (4, 8)
        row_blocks = -(-spec.group_size // most_rows)
        rows = -(-spec.group_size // row_blocks)
        positions = 1 << ((accumulators + rows // 2) // rows).bit_length() - 1
        positions = min(positions, 8, spec.target.lanes)  # whose sums fill at most a vector
        return Blocking(rows, row_blocks, positions, max(1, accumulators // rows))


class Segment:
    """The part of a sequence that a task does for some KV heads, and the task's buffers for it.

    A KV head of the segment is a member: its rows of Q, O and the state begin at
    ``member * padded_rows``.

    Parameters
    ----------
    spec : KernelSpec
    members : int
        KV heads that there is room for.
    """

    def __init__(self, spec: KernelSpec, members: int = 1):
        self.spec, self.lanes, self.blocking = spec, spec.target.lanes, Blocking.of(spec)
        rows, width = self.blocking.padded_rows, spec.qk_head_dim
        self.q = T.alloc_buffer((members * rows, width), F32)
        self.o = T.alloc_buffer((members * rows, spec.v_head_dim), F32)
        self.k = T.alloc_buffer((self.blocking.positions, width), F32)  # rotated rows
        self.weights = T.alloc_buffer((rows, BLOCK), F32)
        row_blocks = members * self.blocking.row_blocks
        self.state = OnlineSoftmax(row_blocks, self.blocking.rows, self.lanes)
        self.bias = AlibiBias.of(spec, members * rows)

    def row_state(self, row):
        """Index of the state of a row of O in `state.top` and `state.total`."""
        rows = self.blocking.rows
        if rows == self.state.stride:
            return row
        return self.state.index(row // rows, row % rows)

    def row_of(self, row):
        """Row of O of the query head `row`, counted over all members."""
        group, padded = self.spec.group_size, self.blocking.padded_rows
        return row if group == padded else row // group * padded + row % group

    def for_row_blocks(self, member, body) -> None:
        """Emit ``body(block, first_row, row)`` for the sets of rows of a member.

        `block` counts over all members, as the rows of Q and O from `first_row` on do, and the rows
        of the weights from `row` on over those of the member.
        """
        rows, row_blocks = self.blocking.rows, self.blocking.row_blocks
        if row_blocks == 1:
            body(member, index_temp(member * rows), 0)
            return
        with T.serial(row_blocks) as i:
            block = index_temp(member * row_blocks + i)
            body(block, index_temp(block * rows), i * rows)

    def start(self, a, sequence, head, member=0) -> None:
        """Take the query rows of a KV head, scaled for exp2, and clear its sums."""
        spec, padded_rows = self.spec, self.blocking.padded_rows
        factor = temp(a.sm_scale * T.float32(LOG2E))
        base = index_temp(member * padded_rows)

        def load_q(row):
            at = (sequence, head * spec.group_size + row)
            return lambda column, lanes: load(a.q, (*at, column), lanes) * broadcast(factor, lanes)

        def store_q(row):
            return lambda column, lanes, value: store(self.q, (base + row, column), lanes, value)

        def plain():
            with T.serial(spec.group_size) as row:
                for c in chunks(spec.qk_head_dim, self.lanes):
                    store_q(row)(c.start, c.lanes, load_q(row)(c.start, c.lanes))

        def rotated():
            a.rope.set_position(a.q_rope_position[sequence])
            with T.serial(spec.group_size) as row:
                a.rope.rotate_row(load_q(row), store_q(row))

        a.rope.either(rotated, plain)
        if self.bias:
            with T.serial(padded_rows) as row:
                query_head = head * spec.group_size + T.min(row, spec.group_size - 1)
                self.bias.set_row(base + row, query_head, a.q_rope_position[sequence])
        padding = padded_rows - spec.group_size
        if padding:
            with T.serial(padding) as row:
                for c in chunks(spec.qk_head_dim, self.lanes):
                    at = (base + spec.group_size + row, c.start)
                    store(self.q, at, c.lanes, constant(0.0, c.lanes))
        with T.serial(padded_rows) as row:
            for c in chunks(spec.v_head_dim, self.lanes):
                store(self.o, (base + row, c.start), c.lanes, constant(0.0, c.lanes))
        self.for_row_blocks(member, lambda block, *_: self.state.reset(block))

    def run(
        self, a, rows: PagedRows, begin, end, k_offset, first_visible=None, members=1, restart=0
    ) -> None:
        """Attend to the positions ``begin .. end - 1``, which RoPE counts from `k_offset`.

        `begin` is aligned to a strip or a page; positions before `first_visible` are hidden. `rows`
        are those of the first member, whose KV head the others follow. After the last position the
        next KV heads are expected, from `restart` on.
        """
        with T.serial((end - begin + BLOCK - 1) // BLOCK) as i:
            first = index_temp(begin + i * BLOCK)
            count = index_temp(T.min(BLOCK, end - first))
            before = None if first_visible is None else index_temp(first_visible - first)
            is_end = first + BLOCK >= end
            next_first = index_temp(T.if_then_else(is_end, restart, first + BLOCK))
            next_member = index_temp(T.if_then_else(is_end, members, 0))
            with T.serial(members) as member:
                is_last = member == members - 1
                step = SimpleNamespace(
                    rows=rows.of_member(member),
                    following=rows.of_member(T.if_then_else(is_last, next_member, member + 1)),
                    following_first=index_temp(T.if_then_else(is_last, next_first, first)),
                    first=first,
                    count=count,
                    before=before,
                    member=member,
                )
                self.step(a, step, k_offset)

    def step(self, a, step: SimpleNamespace, k_offset) -> None:
        """Attend to a block of positions with one member.

        Parameters
        ----------
        step : namespace
            `rows` of the member, its `first` position of the block, their `count`, those `before`
            the first visible one (None: none), the `member`; `following` and `following_first`:
            rows and position of what comes next, to be asked for meanwhile.
        """
        self.scores(a, step, k_offset)
        if self.spec.logit_softcap is not None:
            self.cap()
        if self.bias:
            padded_rows = self.blocking.padded_rows
            with T.serial(padded_rows) as row:
                base = step.member * padded_rows
                position = k_offset + step.first
                self.bias.add(base + row, self.weights, row, position, a.mask.offsets)
        is_partial = step.count < BLOCK
        if step.before is not None:
            is_partial = T.Or(is_partial, step.before > 0)
        with T.If(is_partial), T.Then():
            self.hide(step.count, step.before)
        self.for_row_blocks(step.member, lambda *block: self.attend(step, *block))

    def scores(self, a, step: SimpleNamespace, k_offset) -> None:
        """Multiply the rows of Q with K's rows of a block."""
        at_once = self.blocking.positions
        with T.serial((step.count + at_once - 1) // at_once) as i:
            position = index_temp(step.first + i * at_once)
            following = step.following.tile(step.following_first + i * at_once, at_once)
            paged = step.rows.tile(position, at_once)
            soon = step.rows.tile(position + SOON, at_once)

            def prefetch(t, column):
                following.prefetch_k(t, column)
                paged.prefetch_v(t, column)
                soon.prefetch_k(t, column)

            def multiply(tile):
                self.for_row_blocks(
                    step.member,
                    lambda _, first_row, row: self.score_tile(
                        tile, prefetch, first_row, row, i * at_once
                    ),
                )

            def rotated():
                with T.serial(at_once) as t:
                    row = step.rows.tile(position + t, 1)
                    a.rope.set_position(k_offset + position + t)
                    a.rope.rotate_row(
                        lambda column, lanes: row.load_k(0, column, lanes),
                        lambda column, lanes, value: store(self.k, (t, column), lanes, value),
                    )
                multiply(Tile(lambda row, column: (self.k, (row, column)), None))

            a.rope.either(rotated, lambda: multiply(paged))

    def score_tile(self, tile, prefetch, first_row, weights_row, column) -> None:
        """Multiply one set of rows with a few rows of K; lines that come next are asked for."""
        spec, lanes = self.spec, self.lanes
        rows, step = range(self.blocking.rows), range(self.blocking.positions)
        total = [[Register(lanes, init=constant(0.0, lanes)) for _ in step] for _ in rows]
        line = elements_per_line(spec.kv_dtype)

        def multiply(start, parts):
            for c in parts:
                if c.start % line == 0:
                    for t in step:
                        prefetch(t, start + c.start)
                q = [
                    temp(load(self.q, (first_row + r, start + c.start), c.lanes), c.lanes)
                    for r in rows
                ]
                for t in step:
                    k = temp(tile.load_k(t, start + c.start, c.lanes), c.lanes)
                    for r in rows:
                        if c.lanes == lanes:
                            total[r][t].fma(q[r], k)
                        else:
                            total[r][t].set(
                                total[r][t].get() + widen(temp(q[r] * k, c.lanes), c.lanes)
                            )

        for_columns(spec.qk_head_dim, lanes, max(1, line // lanes), multiply)
        at_once = max(1, lanes // len(step))
        for first in range(0, len(rows), at_once):
            batch = rows[first : first + at_once]
            sums = reduce_each([total[r][t].get() for r in batch for t in step], lanes, add)
            for i, r in enumerate(batch):
                part = [i * len(step) + t for t in step]
                value = shuffle([sums], part) if len(part) > 1 or len(batch) > 1 else sums
                store(self.weights, (weights_row + r, column), len(step), value)

    def cap(self) -> None:
        """Apply the soft-cap to the scores of a block."""
        with T.serial(self.blocking.padded_rows) as row:
            for c in chunks(BLOCK, self.lanes):
                score = load(self.weights, (row, c.start), c.lanes)
                capped = soft_cap(score, self.spec.logit_softcap, c.lanes)
                store(self.weights, (row, c.start), c.lanes, capped)

    def hide(self, count, before) -> None:
        """Hide the positions of a block from `count` on, and those before `before`."""
        lanes = self.lanes
        with T.serial(self.blocking.padded_rows) as row:
            for c in chunks(BLOCK, lanes):
                position = T.ramp(c.start, 1, lanes)
                seen = position < broadcast(count, lanes)
                if before is not None:
                    seen = T.And(seen, position >= broadcast(before, lanes))
                score = load(self.weights, (row, c.start), lanes)
                store(
                    self.weights,
                    (row, c.start),
                    lanes,
                    T.Select(seen, score, constant(HIDDEN, lanes)),
                )

    def attend(self, step: SimpleNamespace, block, first_row, row) -> None:
        """Take a block of positions into the sums of a set of rows."""
        lanes = self.lanes
        self.state.update(
            block,
            BLOCK // lanes,
            lambda i, v: load(self.weights, (row + i, v * lanes), lanes),
            lambda i, v, weight: store(self.weights, (row + i, v * lanes), lanes, weight),
        )
        self.accumulate(step, first_row, row)

    def accumulate(self, step: SimpleNamespace, first_row, weights_row) -> None:
        """Add the weighted rows of V; those that are not visible are not read.

        All columns of a few rows come before the next rows, so that memory is read in order.
        """
        spec, group, run = self.spec, range(self.blocking.rows), min(step.rows.run, STRIP)
        with T.serial(self.blocking.rows) as r:
            for c in chunks(spec.v_head_dim, self.lanes):
                decay = broadcast(self.state.decay[self.row_state(first_row + r)], c.lanes)
                at = (first_row + r, c.start)
                store(self.o, at, c.lanes, load(self.o, at, c.lanes) * decay)

        def add_rows(total, start, parts, column, num_rows):
            tile = step.rows.tile(step.first + column, run)
            following = step.following.tile(step.following_first + column, run)

            def prefetch(t, column):
                following.prefetch_v(t, column)
                following.prefetch_k(t, column)
                if run > SOON:
                    tile.prefetch_v(t + SOON, column)

            hidden = 0
            if step.before is not None:
                hidden = index_temp(T.max(step.before - column, 0))
                num_rows = T.max(hidden, num_rows)
            with T.serial(hidden, num_rows) as t:
                for c in parts:
                    if c.start % elements_per_line(spec.kv_dtype) == 0:
                        prefetch(t, start + c.start)
                weight = [temp(self.weights[weights_row + r, column + t]) for r in group]
                for c in parts:
                    v = temp(tile.load_v(t, start + c.start, c.lanes), c.lanes)
                    for r in group:
                        total[r, c].fma(broadcast(weight[r], c.lanes), v)

        def strip(start, parts, column, left):
            at = {(r, c): (first_row + r, start + c.start) for r in group for c in parts}
            total = {(r, c): Register(c.lanes, init=load(self.o, at[r, c], c.lanes)) for r, c in at}
            if run == STRIP:
                add_rows(total, start, parts, column, left)
            else:
                with T.serial((left + run - 1) // run) as j:
                    within = index_temp(column + j * run)
                    add_rows(total, start, parts, within, T.min(run, left - j * run))
            for (r, c), value in total.items():
                store(self.o, at[r, c], c.lanes, value.get())

        with T.serial((step.count + STRIP - 1) // STRIP) as i:
            left = index_temp(T.min(STRIP, step.count - i * STRIP))
            for_columns(
                spec.v_head_dim,
                self.lanes,
                self.blocking.vectors,
                lambda start, parts: strip(start, parts, i * STRIP, left),
            )
