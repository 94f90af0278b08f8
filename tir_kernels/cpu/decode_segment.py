# SPDX-License-Identifier: Apache-2.0
"""One query row per head over a range of the positions of one sequence and KV head."""

from __future__ import annotations

from dataclasses import dataclass

from tvm.script import tirx as T

from ..alibi import AlibiBias
from ..soft_cap import soft_cap
from ..softmax import HIDDEN, OnlineSoftmax
from ..spec import LOG2E, KernelSpec
from .columns import chunks, for_columns
from .rows import PagedRows, Tile, prefetch_distance
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
STRIP = 16  # rows of V that are read in all their columns before the next ones


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
    """The part of one (sequence, KV head) that a task does, and the task's buffers for it.

    Parameters
    ----------
    spec : KernelSpec
    """

    def __init__(self, spec: KernelSpec):
        self.spec, self.lanes, self.blocking = spec, spec.target.lanes, Blocking.of(spec)
        rows, width = self.blocking.padded_rows, spec.qk_head_dim
        self.q = T.alloc_buffer((rows, width), F32)
        self.o = T.alloc_buffer((rows, width), F32)
        self.k = T.alloc_buffer((self.blocking.positions, width), F32)  # rotated rows
        self.weights = T.alloc_buffer((rows, BLOCK), F32)
        self.state = OnlineSoftmax(self.blocking.row_blocks, self.blocking.rows, self.lanes)
        self.bias = AlibiBias.of(spec, rows)

    def row_state(self, row):
        """Index of a row's state in `state.top` and `state.total`."""
        rows = self.blocking.rows
        return row if self.blocking.row_blocks == 1 else self.state.index(row // rows, row % rows)

    def for_row_blocks(self, body) -> None:
        """Emit ``body(block, first_row)`` for the sets of rows."""
        if self.blocking.row_blocks == 1:
            body(0, 0)
        else:
            with T.serial(self.blocking.row_blocks) as block:
                body(block, block * self.blocking.rows)

    def start(self, a, sequence, head) -> None:
        """Take the query rows, scaled for exp2, and clear the sums."""
        spec = self.spec
        factor = temp(a.sm_scale * T.float32(LOG2E))

        def load_q(row):
            at = (sequence, head * spec.group_size + row)
            return lambda column, lanes: load(a.q, (*at, column), lanes) * broadcast(factor, lanes)

        def store_q(row):
            return lambda column, lanes, value: store(self.q, (row, column), lanes, value)

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
            with T.serial(self.blocking.padded_rows) as row:
                member = head * spec.group_size + T.min(row, spec.group_size - 1)
                self.bias.set_row(row, member, a.q_rope_position[sequence])
        padding = self.blocking.padded_rows - spec.group_size
        if padding:
            with T.serial(padding) as row:
                for c in chunks(spec.qk_head_dim, self.lanes):
                    at = (spec.group_size + row, c.start)
                    store(self.q, at, c.lanes, constant(0.0, c.lanes))
        with T.serial(self.blocking.padded_rows) as row:
            for c in chunks(spec.v_head_dim, self.lanes):
                store(self.o, (row, c.start), c.lanes, constant(0.0, c.lanes))
        self.for_row_blocks(lambda block, _: self.state.reset(block))

    def run(self, a, rows: PagedRows, begin, end, k_offset, first_visible=None) -> None:
        """Attend to the positions ``begin .. end - 1``, which RoPE counts from `k_offset`.

        `begin` is aligned to a strip or a page; positions before `first_visible` are hidden.
        """
        with T.serial((end - begin + BLOCK - 1) // BLOCK) as i:
            first = index_temp(begin + i * BLOCK)
            count = index_temp(T.min(BLOCK, end - first))
            self.scores(a, rows, first, count, k_offset)
            if self.spec.logit_softcap is not None:
                self.cap()
            if self.bias:
                with T.serial(self.blocking.padded_rows) as row:
                    position = k_offset + first
                    self.bias.add(row, self.weights, row, position, a.mask.offsets)
            is_partial = count < BLOCK
            if first_visible is not None:
                is_partial = T.Or(is_partial, first < first_visible)
            with T.If(is_partial):
                with T.Then():
                    self.hide(count, 0 if first_visible is None else first_visible - first)
            before = None if first_visible is None else index_temp(first_visible - first)
            self.for_row_blocks(
                lambda block, row: self.attend(rows, first, count, before, block, row)
            )

    def scores(self, a, rows: PagedRows, first, count, k_offset) -> None:
        """Multiply the rows of Q with K's rows of a block."""
        step, spec = self.blocking.positions, self.spec
        distance = prefetch_distance(spec, step)
        with T.serial((count + step - 1) // step) as i:
            position = index_temp(first + i * step)
            ahead = rows.tile(position + distance, step)

            def multiply(tile):
                self.for_row_blocks(lambda _, row: self.score_tile(tile, ahead, row, i * step))

            def rotated():
                with T.serial(step) as t:
                    row = rows.tile(position + t, 1)
                    a.rope.set_position(k_offset + position + t)
                    a.rope.rotate_row(
                        lambda column, lanes: row.load_k(0, column, lanes),
                        lambda column, lanes, value: store(self.k, (t, column), lanes, value),
                    )
                multiply(Tile(lambda row, column: (self.k, (row, column)), None))

            a.rope.either(rotated, lambda: multiply(rows.tile(position, step)))

    def score_tile(self, tile, ahead, first_row, column) -> None:
        """Multiply one set of rows with a few rows of K; lines that come next are asked for."""
        spec, lanes = self.spec, self.lanes
        rows, step = range(self.blocking.rows), range(self.blocking.positions)
        total = [[Register(lanes, init=constant(0.0, lanes)) for _ in step] for _ in rows]
        line = elements_per_line(spec.kv_dtype)

        def multiply(start, parts):
            for c in parts:
                if c.start % line == 0:
                    for t in step:
                        ahead.prefetch_k(t, start + c.start)
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
                store(self.weights, (first_row + r, column), len(step), value)

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
                if not isinstance(before, int):
                    seen = T.And(seen, position >= broadcast(before, lanes))
                score = load(self.weights, (row, c.start), lanes)
                store(
                    self.weights,
                    (row, c.start),
                    lanes,
                    T.Select(seen, score, constant(HIDDEN, lanes)),
                )

    def attend(self, rows: PagedRows, first, count, before, block, first_row) -> None:
        """Take a block of positions into the sums of a set of rows."""
        self.softmax(block, first_row)
        self.accumulate(rows, first, count, before, first_row)

    def softmax(self, block, first_row) -> None:
        """Turn the scores of a set of rows into weights."""
        lanes = self.lanes
        self.state.update(
            block,
            BLOCK // lanes,
            lambda i, v: load(self.weights, (first_row + i, v * lanes), lanes),
            lambda i, v, weight: store(self.weights, (first_row + i, v * lanes), lanes, weight),
        )

    def accumulate(self, rows: PagedRows, first, count, before, first_row) -> None:
        """Add the weighted rows of V; those beyond the sequence, or before `before`, are not read.

        All columns of a few rows come before the next rows, so that memory is read in order.
        """
        spec, group = self.spec, range(self.blocking.rows)
        distance = prefetch_distance(spec, STRIP)
        with T.serial(self.blocking.rows) as r:
            for c in chunks(spec.v_head_dim, self.lanes):
                decay = broadcast(self.state.decay[r], c.lanes)
                at = (first_row + r, c.start)
                store(self.o, at, c.lanes, load(self.o, at, c.lanes) * decay)

        def add_rows(total, start, parts, position, column, num_rows):
            run = min(rows.run, STRIP)
            tile, ahead = rows.tile(position, run), rows.tile(position + distance, run)
            hidden = 0
            if before is not None:
                hidden = index_temp(T.max(before - column, 0))
                num_rows = T.max(hidden, num_rows)
            with T.serial(hidden, num_rows) as t:
                for c in parts:
                    if c.start % elements_per_line(spec.kv_dtype) == 0:
                        ahead.prefetch_v(t, start + c.start)
                weight = [temp(self.weights[first_row + r, column + t]) for r in group]
                for c in parts:
                    v = temp(tile.load_v(t, start + c.start, c.lanes), c.lanes)
                    for r in group:
                        total[r, c].fma(broadcast(weight[r], c.lanes), v)

        def strip(start, parts, column, left):
            at = {(r, c): (first_row + r, start + c.start) for r in group for c in parts}
            total = {(r, c): Register(c.lanes, init=load(self.o, at[r, c], c.lanes)) for r, c in at}
            if rows.run >= STRIP:
                add_rows(total, start, parts, first + column, column, left)
            else:
                run = rows.run
                with T.serial((left + run - 1) // run) as j:
                    within = index_temp(column + j * run)
                    num_rows = T.min(run, left - j * run)
                    add_rows(total, start, parts, first + within, within, num_rows)
            for (r, c), value in total.items():
                store(self.o, at[r, c], c.lanes, value.get())

        with T.serial((count + STRIP - 1) // STRIP) as i:
            left = index_temp(T.min(STRIP, count - i * STRIP))
            for_columns(
                spec.v_head_dim,
                self.lanes,
                self.blocking.vectors,
                lambda start, parts: strip(start, parts, i * STRIP, left),
            )
