# SPDX-License-Identifier: Apache-2.0
"""Attention of one query row per sequence over its pages.

The work is bound by reading K and V once, so it is cut by pages: the units of the batch are the
pages of every (sequence, KV head), flattened through the page table's indptr, and each task takes
an equal range of them. A (sequence, KV head) that falls into one task is finished there; one that
is cut leaves partial states, which are merged in the same call.
"""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace

from tvm.script import tirx as T

from ..masks import WholeSequence
from ..softmax import HIDDEN, NOTHING_SEEN, OnlineSoftmax, inverse_total, log_sum
from ..spec import LOG2E, KernelSpec
from .arguments import index_array, page_pool, require_half_conversion, rows_array
from .columns import chunks, for_columns
from .inline_rope import InlineRope
from .rows import PagedRows, Tile, prefetch_distance
from .shuffles import reduce_each, widen
from .simd import (
    F32,
    Register,
    add,
    broadcast,
    constant,
    elements_per_line,
    exp2,
    index_temp,
    load,
    shuffle,
    store,
    temp,
)
from .tasks import cut, for_tasks, num_threads

BLOCK = 64  # positions of a softmax step
STRIP = 16  # rows of V that are read in all their columns before the next ones
MOST_TASKS = 128
SERIAL_ELEMENTS = 1 << 15  # elements of K below which a launch costs more than it saves


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
        return Blocking(rows, row_blocks, min(positions, 8), max(1, accumulators // rows))


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

    def run(self, a, rows: PagedRows, begin, end, k_offset) -> None:
        """Attend to the positions ``begin .. end - 1``, which RoPE counts from `k_offset`."""
        with T.serial((end - begin + BLOCK - 1) // BLOCK) as i:
            first = index_temp(begin + i * BLOCK)
            count = index_temp(T.min(BLOCK, end - first))
            self.scores(a, rows, first, count, k_offset)
            with T.If(count < BLOCK):
                with T.Then():
                    self.hide(count)
            self.for_row_blocks(lambda block, row: self.attend(rows, first, count, block, row))

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
                q = [temp(load(self.q, (first_row + r, start + c.start), c.lanes), c.lanes)
                     for r in rows]
                for t in step:
                    k = temp(tile.load_k(t, start + c.start, c.lanes), c.lanes)
                    for r in rows:
                        if c.lanes == lanes:
                            total[r][t].fma(q[r], k)
                        else:
                            total[r][t].set(total[r][t].get() + widen(temp(q[r] * k, c.lanes), c.lanes))

        for_columns(spec.qk_head_dim, lanes, max(1, line // lanes), multiply)
        at_once = max(1, lanes // len(step))
        for first in range(0, len(rows), at_once):
            batch = rows[first : first + at_once]
            sums = reduce_each([total[r][t].get() for r in batch for t in step], lanes, add)
            for i, r in enumerate(batch):
                part = [i * len(step) + t for t in step]
                value = shuffle([sums], part) if len(part) > 1 or len(batch) > 1 else sums
                store(self.weights, (first_row + r, column), len(step), value)

    def hide(self, count) -> None:
        """Hide the positions of a block from `count` on."""
        lanes = self.lanes
        with T.serial(self.blocking.padded_rows) as row:
            for c in chunks(BLOCK, lanes):
                seen = T.ramp(c.start, 1, lanes) < broadcast(count, lanes)
                score = load(self.weights, (row, c.start), lanes)
                store(self.weights, (row, c.start), lanes,
                      T.Select(seen, score, constant(HIDDEN, lanes)))

    def attend(self, rows: PagedRows, first, count, block, first_row) -> None:
        """Take a block of positions into the sums of a set of rows."""
        self.softmax(block, first_row)
        self.accumulate(rows, first, count, first_row)

    def softmax(self, block, first_row) -> None:
        """Turn the scores of a set of rows into weights."""
        lanes = self.lanes
        self.state.update(
            block,
            BLOCK // lanes,
            lambda i, v: load(self.weights, (first_row + i, v * lanes), lanes),
            lambda i, v, weight: store(self.weights, (first_row + i, v * lanes), lanes, weight),
        )

    def accumulate(self, rows: PagedRows, first, count, first_row) -> None:
        """Add the weighted rows of V; rows beyond the sequence are not read.

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
            with T.serial(num_rows) as t:
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
            total = {
                (r, c): Register(c.lanes, init=load(self.o, at[r, c], c.lanes)) for r, c in at
            }
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
                spec.v_head_dim, self.lanes, self.blocking.vectors,
                lambda start, parts: strip(start, parts, i * STRIP, left),
            )


class Partials:
    """States of (sequence, KV head) pairs that were cut, two slots for each task.

    The even slot of a task is for a pair that an earlier task began, the odd one for a pair that
    this task begins and does not end.
    """

    def __init__(self, spec: KernelSpec):
        self.spec = spec
        slots = 2 * MOST_TASKS  # memory that no task touches is never mapped
        self.o = T.alloc_buffer((slots, spec.group_size, spec.v_head_dim), F32)
        self.top = T.alloc_buffer((slots, spec.group_size), F32)
        self.total = T.alloc_buffer((slots, spec.group_size), F32)

    def put(self, slot, segment: Segment) -> None:
        """Keep the state of a segment."""
        with T.serial(self.spec.group_size) as row:
            for c in chunks(self.spec.v_head_dim, segment.lanes):
                store(self.o, (slot, row, c.start), c.lanes,
                      load(segment.o, (row, c.start), c.lanes))
            state = segment.row_state(row)
            T.buffer_store(self.top, segment.state.top[state], [slot, row])
            T.buffer_store(self.total, segment.state.total[state], [slot, row])

    def merge(self, first_task, count, output) -> None:
        """Finish the pair that `first_task` begins and the ``count - 1`` tasks after it go on with.

        Parameters
        ----------
        output : Output
        """
        top, total = Register(1), Register(1)

        def slot(i):
            return (first_task + i) * 2 + T.if_then_else(i == 0, 1, 0)

        with T.serial(self.spec.group_size) as row:
            top.set(T.float32(NOTHING_SEEN))
            total.set(T.float32(0))
            with T.serial(count) as i:
                top.set(T.max(top.get(), self.top[slot(i), row]))
            with T.serial(count) as i:
                factor = exp2(self.top[slot(i), row] - top.get(), 1)
                T.buffer_store(self.top, factor, [slot(i), row])
                total.set(total.get() + factor * self.total[slot(i), row])
            inverse = temp(inverse_total(total.get()))

            def some_columns(start, parts):
                value = [Register(c.lanes, init=constant(0.0, c.lanes)) for c in parts]
                with T.serial(count) as i:
                    factor = temp(self.top[slot(i), row] * inverse)
                    for c, register in zip(parts, value, strict=True):
                        o = load(self.o, (slot(i), row, start + c.start), c.lanes)
                        register.fma(o, broadcast(factor, c.lanes))
                for c, register in zip(parts, value, strict=True):
                    output.put(row, start + c.start, c.lanes, register.get())

            for_columns(self.spec.v_head_dim, self.spec.target.lanes, 4, some_columns)
            output.put_lse(row, log_sum(top.get(), total.get()))


class Output:
    """Rows of O and LSE of one sequence and KV head."""

    def __init__(self, spec: KernelSpec, o, lse, sequence, head):
        self.o, self.lse, self.sequence = o, lse, sequence
        self.spec, self.first_head = spec, head * spec.group_size

    def put(self, row, column, lanes: int, value) -> None:
        """Store columns of a row."""
        store(self.o, (self.sequence, self.first_head + row, column), lanes, value)

    def put_lse(self, row, value) -> None:
        """Store the log of a row's sum."""
        T.buffer_store(self.lse, value, [self.sequence, self.first_head + row])

    def finish(self, segment: Segment) -> None:
        """Store a segment that is the whole of its sequence and head."""
        with T.serial(self.spec.group_size) as row:
            state = segment.row_state(row)
            total = temp(segment.state.total[state])
            inverse = temp(inverse_total(total))
            for c in chunks(self.spec.v_head_dim, segment.lanes):
                o = load(segment.o, (row, c.start), c.lanes)
                self.put(row, c.start, c.lanes, o * broadcast(inverse, c.lanes))
            self.put_lse(row, log_sum(segment.state.top[state], total))

    def clear(self) -> None:
        """Store the result of a sequence that holds nothing."""
        with T.serial(self.spec.group_size) as row:
            for c in chunks(self.spec.v_head_dim, self.spec.target.lanes):
                self.put(row, c.start, c.lanes, constant(0.0, c.lanes))
            self.put_lse(row, log_sum(T.float32(0), T.float32(0)))


def emit_decode(spec: KernelSpec, a: SimpleNamespace) -> None:
    """Emit the body: `a` holds the matched arguments by their names."""
    heads = spec.num_kv_heads
    total = index_temp(a.page_indptr[a.batch_size] * heads)
    elements = T.cast(total, "int64") * (spec.page_size * spec.qk_head_dim)
    most = T.min(T.min(num_threads(), MOST_TASKS), total)
    num_tasks = index_temp(T.if_then_else(elements > SERIAL_ELEMENTS, most, 1))
    partials = Partials(spec)
    a.rope = InlineRope(spec, a)

    def pages_of(sequence):
        first = index_temp(a.page_indptr[sequence])
        return first, index_temp(a.page_indptr[sequence + 1] - first)

    def task_body(task):
        segment = Segment(spec)
        a.rope.begin_task()
        current = Register(1, "int32", cut(total, task, num_tasks))
        last = index_temp(cut(total, task + 1, num_tasks))
        sequence = Register(1, "int32", T.int32(0))
        with T.While(current.get() < last):
            with T.While(a.page_indptr[sequence.get() + 1] * heads <= current.get()):
                sequence.set(sequence.get() + 1)
            b = index_temp(sequence.get())
            first_entry, num_pages = pages_of(b)
            unit = index_temp(current.get() - first_entry * heads)
            head = index_temp(unit // num_pages)
            first_page = index_temp(unit - head * num_pages)
            last_page = index_temp(T.min(num_pages, first_page + last - current.get()))
            kv_len = a.lengths.kv_len(b, num_pages)
            rows = PagedRows(
                spec, a.pages, a.page_values, first_entry, first_entry + num_pages - 1,
                head=head, slot_of=a.lengths.slot_of,
            )
            k_offset = index_temp(a.k_rope_pos_offset[b])
            a.rope.begin_sequence(k_offset + kv_len)
            segment.start(a, b, head)
            begin = index_temp(first_page * spec.page_size)
            end = index_temp(T.min(last_page * spec.page_size, kv_len))
            segment.run(a, rows, begin, end, k_offset)
            with T.If(last_page - first_page == num_pages):
                with T.Then():
                    Output(spec, a.o, a.lse, b, head).finish(segment)
                with T.Else():
                    partials.put(task * 2 + T.if_then_else(first_page > 0, 0, 1), segment)
            current.set(current.get() + last_page - first_page)

    for_tasks(num_tasks, task_body)

    # The pairs that were cut, found by their cuts.
    sequence = Register(1, "int32", T.int32(0))
    with T.serial(num_tasks - 1) as task:
        at = index_temp(cut(total, task + 1, num_tasks))
        with T.While(a.page_indptr[sequence.get() + 1] * heads <= at):
            sequence.set(sequence.get() + 1)
        first_entry, num_pages = pages_of(sequence.get())
        head = index_temp((at - first_entry * heads) // num_pages)
        begin = index_temp(first_entry * heads + head * num_pages)
        # Only the cut in the task that begins the pair counts.
        with T.If(T.And(at > begin, cut(total, task, num_tasks) <= begin)):
            with T.Then():
                count = Register(1, "int32", T.int32(1))
                with T.While(
                    T.And(
                        task + count.get() < num_tasks,
                        cut(total, task + count.get(), num_tasks) < begin + num_pages,
                    )
                ):
                    count.set(count.get() + 1)
                partials.merge(task, count.get(), Output(spec, a.o, a.lse, sequence.get(), head))
    with T.serial(a.batch_size) as b:
        with T.If(a.page_indptr[b + 1] == a.page_indptr[b]):
            with T.Then():
                with T.serial(heads) as head:
                    Output(spec, a.o, a.lse, b, head).clear()


def decode(spec: KernelSpec):
    """Build the kernel `decode`: attention of one query row per sequence.

    Its arguments are, with B sequences, P pages of the pool and N page table entries

    * q ``[B, Hq, D]``, dtype;
    * pages ``[P, 2, Hk, page, D]``, kv_dtype;
    * page_indptr ``[B + 1]``, page_values ``[N]``, length_info ``[B]``, k_rope_pos_offset ``[B]``
      and q_rope_position ``[B]``, int32, at any element offset;
    * o ``[B, Hq, D]``, dtype, and lse ``[B, Hq]``, float32, which are written;
    * rotary_mode: int32, rope_scale, rope_theta, sm_scale: float32.

    Parameters
    ----------
    spec : KernelSpec

    Returns
    -------
    tvm.tirx.PrimFunc

    Raises
    ------
    ValueError
        For float16 on a target that cannot convert it.
    """
    require_half_conversion(spec, spec.dtype, spec.kv_dtype)
    heads, width = spec.num_qo_heads, spec.qk_head_dim

    @T.prim_func(s_tir=True, private=True)
    def attention_decode(
        q: T.handle,
        pages: T.handle,
        page_indptr: T.handle,
        page_values: T.handle,
        length_info: T.handle,
        k_rope_pos_offset: T.handle,
        q_rope_position: T.handle,
        o: T.handle,
        lse: T.handle,
        rotary_mode: T.int32,
        rope_scale: T.float32,
        rope_theta: T.float32,
        sm_scale: T.float32,
    ):
        T.func_attr({"tirx.is_scheduled": True, "tirx.noalias": True})
        batch_size = T.int32()
        num_entries = T.int32()
        emit_decode(
            spec,
            SimpleNamespace(
                batch_size=batch_size,
                q=rows_array(q, (batch_size, heads, width), spec.dtype),
                pages=page_pool(pages, spec),
                page_indptr=index_array(page_indptr, batch_size + 1),
                page_values=index_array(page_values, num_entries),
                lengths=WholeSequence(spec, length_info, batch_size),
                k_rope_pos_offset=index_array(k_rope_pos_offset, batch_size),
                q_rope_position=index_array(q_rope_position, batch_size),
                o=rows_array(o, (batch_size, heads, width), spec.dtype),
                lse=rows_array(lse, (batch_size, heads), F32),
                rotary_mode=rotary_mode,
                rope_scale=rope_scale,
                rope_theta=rope_theta,
                sm_scale=sm_scale,
            ),
        )

    return attention_decode
