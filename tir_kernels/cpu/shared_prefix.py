# SPDX-License-Identifier: Apache-2.0
"""Attention of the rows of many sequences to pages that they have in common, merged in place.

A tile is some rows of a segment, whatever sequences they belong to, with the query heads of one KV
head: K and V are packed once for all of them, as in `prefill`. The positions of a tile are cut as
well, as in `mla`, so that one segment and one KV head use every thread.
"""

from __future__ import annotations

from types import SimpleNamespace

from tvm.script import tirx as T

from ..masks import CausalMask
from ..merge import MergedLse, weighted
from ..softmax import inverse_total, log_sum
from ..spec import LOG2E, KernelSpec
from .arguments import index_array, page_pool, require_half_conversion, rows_array
from .columns import chunks
from .inline_rope import InlineRope
from .partials import MOST_TASKS, Partials
from .prefill import operands
from .prefill_unit import POSITIONS, Tiling, Unit
from .rows import PagedRows
from .simd import F32, Register, broadcast, index_temp, load, store, temp
from .tasks import cut, for_tasks, num_threads

SERIAL_WORK = 1 << 20  # multiply-adds below which a launch costs more than it saves


class _Tile(SimpleNamespace):
    """Rows of a segment with the query heads of one KV head.

    `segment`, `head`; `first_row` in the row ids and `num_rows` of the tile; `kv_len`; `before`,
    the cost of all earlier tiles, and `cost`: its blocks of positions times its rows.
    """


def _for_tiles(spec: KernelSpec, a: SimpleNamespace, body):
    """Emit ``body(tile)`` for every tile of the segments; returns the cost of all."""
    most = Tiling.of(spec).tokens
    before = Register(1, "int32", T.int32(0))
    with T.serial(a.last_segment - a.first_segment) as i:
        segment = index_temp(a.first_segment + i)
        begin, end = (index_temp(a.row_indptr[segment + n]) for n in range(2))
        num_pages = a.page_indptr[segment + 1] - a.page_indptr[segment]
        kv_len = index_temp(num_pages * spec.page_size)
        num_blocks = index_temp((kv_len + POSITIONS - 1) // POSITIONS)
        # Tiles of like size: a small last one would pack K and V for few rows.
        num_tiles = index_temp((end - begin + most - 1) // most)
        with T.serial(spec.num_kv_heads) as head, T.serial(num_tiles) as tile:
            first_row = index_temp(begin + cut(end - begin, tile, num_tiles))
            num_rows = index_temp(begin + cut(end - begin, tile + 1, num_tiles) - first_row)
            cost = index_temp(num_blocks * num_rows)
            body(
                _Tile(
                    segment=segment,
                    head=head,
                    first_row=first_row,
                    num_rows=num_rows,
                    kv_len=kv_len,
                    before=index_temp(before.get()),
                    cost=cost,
                )
            )
            before.set(before.get() + cost)
    return index_temp(before.get())


class _Output:
    """Rows of O and LSE of a tile, into which a result is merged."""

    def __init__(self, spec: KernelSpec, a: SimpleNamespace, tile: _Tile):
        self.spec, self.a, self.tile = spec, a, tile

    def put_lse(self, row, value) -> None:
        """Merge the log of a row's sum; to be called before the columns of the row are put."""
        group = self.spec.group_size
        self.row = index_temp(self.a.row_ids[self.tile.first_row + row // group])
        self.head = index_temp(self.tile.head * group + row % group)
        merged = MergedLse(self.a.lse[self.row, self.head], value, 1)
        self.weights = merged.weights
        T.buffer_store(self.a.lse, merged.lse, [self.row, self.head])

    def put(self, row, column, lanes: int, value) -> None:
        """Merge columns of a row."""
        at = (self.row, self.head, column)
        before = weighted(self.a.o, at, self.weights[0], lanes)
        store(self.a.o, at, lanes, before + value * broadcast(self.weights[1], lanes))


class _SharedUnit(Unit):
    """The rows of a tile over some of the positions of the segment."""

    def row_state(self, row):
        """Index of a row's state in `state.top` and `state.total`."""
        return self.state.index(row // self.tiling.rows, row % self.tiling.rows)

    def run_blocks(self, a: SimpleNamespace, tile: _Tile, rows: PagedRows, begin, end) -> None:
        """Attend to the blocks of positions ``begin .. end - 1``, from a cleared state."""
        tiling, group = self.tiling, self.spec.group_size
        num_rows = index_temp(tile.num_rows * group)
        num_blocks = index_temp((num_rows + tiling.rows - 1) // tiling.rows)
        factor = temp(a.sm_scale * T.float32(LOG2E))
        with T.serial(num_blocks * tiling.rows) as row:
            source = index_temp(T.min(row, num_rows - 1))
            token = index_temp(a.row_ids[tile.first_row + source // group])
            self.load_q(a, row, token, index_temp(tile.head * group + source % group), factor)
        with T.serial(num_blocks) as block:
            self.state.reset(block)
        k_offset = index_temp(a.k_rope_pos_offset[tile.segment])
        step = SimpleNamespace(rows=rows, kv_len=tile.kv_len, k_offset=k_offset)
        with T.serial(begin, end) as i:
            first = index_temp(i * POSITIONS)
            self.pack(a, step, first)
            with T.serial(num_blocks) as block:
                self.attend(a, block, first, lambda row: tile.kv_len, None, factor)

    def finish_row(self, row, output: _Output) -> None:
        """Merge a row that has seen the whole segment."""
        state = self.row_state(row)
        total = temp(self.state.total[state])
        output.put_lse(row, log_sum(self.state.top[state], total))
        inverse = temp(inverse_total(total))
        for c in chunks(self.spec.v_head_dim, self.lanes):
            o = load(self.o, (row, c.start), c.lanes) * broadcast(inverse, c.lanes)
            output.put(row, c.start, c.lanes, o)


def emit_shared(spec: KernelSpec, ops, a: SimpleNamespace) -> None:
    """Emit the body: `a` holds the matched arguments by their names."""
    a.rope, a.mask = InlineRope(spec, a), CausalMask(T.int32(0))
    if spec.rope.kind == "longrope":
        message = "with longrope rows of several sequences may need K rotated in different ways"
        with T.Assert(a.rotary_mode != 1, message, "ValueError"):
            T.evaluate(0)
    total = _for_tiles(spec, a, lambda tile: None)
    width = spec.group_size * (spec.qk_head_dim + spec.v_head_dim)
    work = T.cast(total, "int64") * (POSITIONS * width)
    most = T.min(T.min(num_threads(), MOST_TASKS), total)
    num_tasks = index_temp(T.if_then_else(work > SERIAL_WORK, most, 1))
    partials = Partials(spec, Tiling.of(spec).tokens * spec.group_size)
    ops.begin([b for b in (a.q, a.pages) if str(b.dtype) == "bfloat16"])

    def attend(task):
        unit = _SharedUnit(spec, ops)
        a.rope.begin_task()
        a.rope.begin_sequence(T.int32(0))
        task_begin = index_temp(cut(total, task, num_tasks))
        task_end = index_temp(cut(total, task + 1, num_tasks))

        def attend_tile(tile):
            begin = index_temp(T.max(task_begin - tile.before, 0))
            end = index_temp(T.min(task_end - tile.before, tile.cost))
            with T.If(begin < end), T.Then():
                first = index_temp(a.page_indptr[tile.segment])
                last = index_temp(a.page_indptr[tile.segment + 1] - 1)
                rows = PagedRows(spec, a.pages, a.page_values, first, last, head=tile.head)

                def block_of(cost):
                    return index_temp((cost + tile.num_rows - 1) // tile.num_rows)

                unit.run_blocks(a, tile, rows, block_of(begin), block_of(end))
                num_rows = index_temp(tile.num_rows * spec.group_size)
                with T.If(T.And(begin == 0, end == tile.cost)):
                    with T.Then(), T.serial(num_rows) as row:
                        unit.finish_row(row, _Output(spec, a, tile))
                    with T.Else():
                        slot = task * 2 + T.if_then_else(begin > 0, 0, 1)
                        partials.put(slot, unit, num_rows)

        _for_tiles(spec, a, attend_tile)

    with ops.scope():
        for_tasks(num_tasks, attend)

    def merge(task):
        """Finish some rows of every tile that was cut."""
        first = Register(1, "int32", T.int32(0))  # the task that begins the tile

        def merge_tile(tile):
            end = index_temp(tile.before + tile.cost)
            with T.While(cut(total, first.get() + 1, num_tasks) <= tile.before):
                first.set(first.get() + 1)
            with T.If(cut(total, first.get() + 1, num_tasks) < end), T.Then():
                count = Register(1, "int32", T.int32(1))
                with T.While(cut(total, first.get() + count.get(), num_tasks) < end):
                    count.set(count.get() + 1)
                num_rows = index_temp(tile.num_rows * spec.group_size)
                share = [index_temp(cut(num_rows, task + i, num_tasks)) for i in range(2)]
                partials.merge(first.get(), count.get(), _Output(spec, a, tile), share)

        _for_tiles(spec, a, merge_tile)

    with T.If(num_tasks > 1), T.Then():
        for_tasks(num_tasks, merge)


def prefill_shared(spec: KernelSpec):
    """Build the kernel `prefill_shared`: rows of several sequences attend to pages they share.

    A segment is a range of whole pages with the rows that see all of them. In one call a row may
    belong to one segment at most. What the rows see in it is merged into their o and lse.

    Its arguments are, with T rows, S segments with R rows in all, P pages of the pool and N page
    table entries

    * q ``[T, Hq, D]``, dtype; pages ``[P, 2, Hk, page, D]``, kv_dtype;
    * page_indptr ``[S + 1]``, page_values ``[N]`` and k_rope_pos_offset ``[S]``, the position of a
      segment's first slot, int32; int32 arrays may start at any element;
    * row_indptr ``[S + 1]`` and row_ids ``[R]``, the rows of the segments, int32;
    * q_rope_position ``[T]``, int32;
    * o ``[T, Hq, D]``, dtype, and lse ``[T, Hq]``, float32, which are read and written;
    * first_segment, last_segment: int32, the segments ``first_segment .. last_segment - 1`` to
      attend to;
    * rotary_mode: int32, rope_scale, rope_theta, sm_scale: float32. With longrope, whose
      frequencies are those of a sequence, rotary_mode 1 is refused.

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
    ops = operands(spec, spec.kv_dtype)

    @T.prim_func(s_tir=True, private=True)
    def attention_prefill_shared(
        q: T.handle,
        pages: T.handle,
        page_indptr: T.handle,
        page_values: T.handle,
        k_rope_pos_offset: T.handle,
        row_indptr: T.handle,
        row_ids: T.handle,
        q_rope_position: T.handle,
        o: T.handle,
        lse: T.handle,
        first_segment: T.int32,
        last_segment: T.int32,
        rotary_mode: T.int32,
        rope_scale: T.float32,
        rope_theta: T.float32,
        sm_scale: T.float32,
    ):
        T.func_attr({"tirx.is_scheduled": True, "tirx.noalias": True})
        num_rows = T.int32()
        num_segments = T.int32()
        num_entries = T.int32()
        num_row_ids = T.int32()
        emit_shared(
            spec,
            ops,
            SimpleNamespace(
                q=rows_array(q, (num_rows, heads, width), spec.dtype),
                pages=page_pool(pages, spec),
                k_rope_pos_offset=index_array(k_rope_pos_offset, num_segments),
                page_indptr=index_array(page_indptr, num_segments + 1),
                page_values=index_array(page_values, num_entries),
                row_indptr=index_array(row_indptr, num_segments + 1),
                row_ids=index_array(row_ids, num_row_ids),
                q_rope_position=index_array(q_rope_position, num_rows),
                o=rows_array(o, (num_rows, heads, width), spec.dtype),
                lse=rows_array(lse, (num_rows, heads), F32),
                first_segment=first_segment,
                last_segment=last_segment,
                rotary_mode=rotary_mode,
                rope_scale=rope_scale,
                rope_theta=rope_theta,
                sm_scale=sm_scale,
            ),
        )

    return attention_prefill_shared
