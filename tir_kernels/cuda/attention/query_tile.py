# SPDX-License-Identifier: Apache-2.0
"""A tile of a sequence's tokens, with the query heads of one KV head, over all that they see.

The rows of a tile are tokens times the heads of the group, so K and V are read once for all of
these heads, and few tokens fill the rows of an instruction too.
"""

from __future__ import annotations

from dataclasses import replace

from tvm.script import tirx as T
from tvm.script.ir_builder import IRBuilder

from ...semantics.visibility import Span
from ...spec import LOG2E, KernelSpec
from ..components.code_pipeline import kv_pipeline
from ..components.inline_rope import InlineRope
from ..components.kv_rows import as_int64
from ..components.logits import Logits
from ..components.pipeline import ThreadGroup, commit, copy_rows, wait, zero_padding
from ..components.softmax import OnlineSoftmax, products_of
from ..elements import store_words
from ..emit import F32, I32, U32, WARP, Registers, index_temp, opaque, ptx, sync_block
from ..scalars import temp
from ..tiles.fma import MultiplyAdds
from ..tiles.hadamard import hadamard_blocks, rotate_accumulators, rotate_rows
from ..tiles.mma import TensorCores
from ..tiles.shared_tiles import SharedTiles
from ..tiles.tiling import Tiling
from .non_finite_v import FIRST_WORD, NonFiniteGuard
from .tile_step import TileStep

# Fields of a step and of its gap that are kept in shared memory.
SPILLED = ("kv_len", "k_offset", "first_row", "num_rows", "first", "head")
SPILLED_OF_GAP = ("sinks", "begin", "back")
assert len(SPILLED) + len(SPILLED_OF_GAP) <= FIRST_WORD


class QueryTile:
    """Per-block state and work of a tile. Subclasses say how columns are split.

    Parameters
    ----------
    spec : KernelSpec
    tiling : Tiling
    a : the kernel's arguments.
    step : TileStep
    thread : int32 expression
    guard : NonFiniteGuard, optional
        None: all rows see the same columns.
    """

    def __init__(
        self,
        spec: KernelSpec,
        tiling: Tiling,
        a,
        step: TileStep,
        thread,
        guard: NonFiniteGuard | None = None,
    ):
        self.spec, self.tiling, self.a, self.step, self.guard = spec, tiling, a, step, guard
        self._assign_rows(thread)
        self.threads = ThreadGroup(thread, tiling.num_threads, sync_block)
        memory = T.alloc_buffer((tiling.num_bytes,), "uint8", scope="shared.dyn", align=128)
        self.memory = IRBuilder.name("shared", memory)
        self.q = SharedTiles(memory, 0, tiling.q)
        self.o = SharedTiles(memory, 0, tiling.o)
        self.v_begin = step.slice * tiling.columns
        is_tensor = tiling.is_tensor
        products = TensorCores if is_tensor else MultiplyAdds
        self.products = products(tiling, self.q, self.warp_row, self.lane)
        self.softmax = OnlineSoftmax(tiling.columns, tiling.rows_of_thread)
        self.q_blocks, self.o_blocks = hadamard_blocks(tiling)
        self.logits = Logits(spec, tiling.rows_of_thread, self.lane)
        self.rope = InlineRope(spec, a.rotary_mode)
        self.rope.begin(step.length)
        self.o_chunks = spec.v_head_dim // tiling.o.per_chunk
        if tiling.slices > 1:
            left_chunks = T.truncdiv(spec.v_head_dim - self.v_begin, tiling.o.per_chunk)
            self.o_chunks = index_temp(T.min(tiling.o.chunks, left_chunks))
        self.tree = a.tree
        self.tree.begin(self)
        begin = max(self.q.end, self.o.end)
        self.pipeline = kv_pipeline(spec, tiling, memory, begin, self.threads, step.slice)
        self.k, self.v, self.scales = self.pipeline.k, self.pipeline.v, self.pipeline.scales
        self.v_chunks = self.pipeline.v_chunks
        self.tables_begin = self.pipeline.end_byte

    def _assign_rows(self, thread) -> None:
        """Find which rows of the tile are the thread's."""
        self.thread = thread
        self.lane = index_temp(T.truncmod(thread, WARP))
        self.warp_row = index_temp(T.truncdiv(thread, WARP) * self.tiling.warp_rows)

    def table(self, i):
        """Return a pointer to entry i of the table of columns, 4 bytes for each position."""
        return self.memory.ptr_to([self.tables_begin + i * 4])

    def bounds_pointer(self, row):
        """Return a pointer to a row's first visible column and the one after its last: 8 bytes."""
        return self.memory.ptr_to([self.tables_begin + self.tiling.table_bytes + row * 8])

    def word_pointer(self, i: int):
        """Return a pointer to word i of the block's spilled fields."""
        end = self.tables_begin + self.tiling.table_bytes + self.tiling.rows * 8
        return self.memory.ptr_to([end + i * 4])

    # --- rows of the tile -----------------------------------------------------------------------

    def _flat(self, row):
        """Row of the tile -> row of the sequence, in tokens times heads.

        Rows past the end repeat the last row.
        """
        return T.min(self.step.first + row, self.step.num_rows * self.spec.group_size - 1)

    def token(self, row):
        """Return the token, within the sequence, of a row of the tile."""
        return T.truncdiv(self._flat(row), self.spec.group_size)

    def row_of_q(self, row):
        """The row of Q and O of a row of the tile."""
        return self.step.first_row + self.token(row)

    def output_row(self, row) -> tuple:
        """Index of a row of the tile in Q and O, and in their logs."""
        return as_int64(self.row_of_q(row)), self.head(row)

    def has_row(self, row):
        """Whether a row of the tile is a row of the sequence."""
        return self.step.first + row < self.step.num_rows * self.spec.group_size

    def head(self, row):
        """The query head of a row of the tile."""
        group = self.spec.group_size
        return self.step.head * group + T.truncmod(self._flat(row), group)

    def own_row(self, h: int):
        """Row h of the thread, in the tile."""
        return self.warp_row + T.truncdiv(self.lane, 4) + 8 * h

    def _end_of(self, row):
        return self.a.mask.end(self.token(row), self.step.num_rows, self.step.kv_len)

    def _begin_of(self, row, span: Span):
        token, step, mask = self.token(row), self.step, self.a.mask
        begin = T.int32(0)
        if mask.has_window:
            begin = mask.begin(token, step.num_rows, step.kv_len)
        if span.begin is not None:
            own = mask.own(token, step.num_rows, step.kv_len)
            begin = T.max(begin, span.first_seen(own))
        return begin

    def _position(self, row, span: Span):
        """RoPE position of the token of a row."""
        own = self.a.q_rope_position[self.row_of_q(row)]
        return own if span.begin is None else T.min(own, span.last_position)

    # --- attention ------------------------------------------------------------------------------

    def run(self) -> None:
        """Attend and store."""
        step = self.step
        self.softmax.reset()
        if self.scales:
            self.scales.range.reset()
        if self.guard:
            self.guard.begin(self)
        zero_padding(self.q, self.spec.qk_head_dim, self.thread, self.tiling.num_threads)
        zero_padding(self.k, self.spec.qk_head_dim, self.thread, self.tiling.num_threads)
        self._spill()
        if step.gap is None:
            self._run_span(Span.whole(step.kv_len, step.k_offset))
        else:
            with T.serial(step.gap.num_spans) as i:
                step = self._reload()
                self._run_span(step.gap.span(i, step.kv_len, step.k_offset))
        self._reload()
        self.softmax.finish()
        if self.scales:
            self.scales.range.finish(self.softmax.output)
            rotate_accumulators(self.softmax.output, self.o_blocks, self.lane)
        if self.guard:
            self.guard.end(self)
        else:
            self._prepare()
            self.store_lse()
            self.store_rows()

    def _spill(self) -> None:
        """Spill the step to shared memory: passes over columns need the registers."""
        step = self.step
        values = [getattr(step, name) for name in SPILLED]
        if step.gap is not None:
            values += [getattr(step.gap, name) for name in SPILLED_OF_GAP]
        for i, value in enumerate(values):
            ptx("st.shared.b32", self.word_pointer(i), T.cast(value, U32))

    def _reload(self) -> TileStep:
        """The step, with its spilled fields in registers again."""
        gap = self.step.gap
        words = Registers(len(SPILLED) + (len(SPILLED_OF_GAP) if gap else 0), U32, "step")
        for i in range(words.count):
            ptx("ld.shared.b32", words[i], self.word_pointer(i))
        values = [index_temp(T.cast(words[i], I32)) for i in range(words.count)]
        if gap:
            gap = replace(gap, **dict(zip(SPILLED_OF_GAP, values[len(SPILLED) :], strict=True)))
        fields = dict(zip(SPILLED, values, strict=False))
        self.step = replace(self.step, **fields, gap=gap)
        return self.step

    def _run_span(self, span: Span) -> None:
        """Attend to the columns of a span."""
        last_row = self.tiling.rows - 1
        start = index_temp(self._begin_of(0, span))
        end = index_temp(T.min(self._end_of(last_row), span.end))
        start, end = self._split_of(start, end)
        with T.If(start < end), T.Then():
            self._attend(span, start, end)

    def _split_of(self, start, end) -> tuple:
        """The columns of the block, of ``start .. end - 1``, which rows of the tile see."""
        return start, end

    def _attend(self, span: Span, start, end) -> None:
        tiling, lane = self.tiling, self.lane
        if self.logits.has_alibi:
            for h in range(tiling.rows_of_thread):
                row = self.own_row(h)
                self.logits.set_row(h, self.head(row), self._position(row, span))
        # Between these, all rows of the block see all columns.
        tree = self.tree
        shared_end = index_temp(T.min(tree.shared_end(self._end_of(0)), span.end))
        last_begin = self._begin_of(tiling.rows - 1, span)
        shared_begin = index_temp(tree.shared_begin(last_begin))
        factor = temp(self.a.sm_scale * T.float32(LOG2E))
        warp_end = self._end_of_warp()
        self._keep_bounds(span)
        self._load_q(span)
        self.products.begin()
        rows = self.step.rows(tiling.rows_per_thread)
        scores = products_of(tiling.positions, tiling.rows_of_thread)

        def visit(first, stage):
            tree.begin_tile(self, first)
            if self.guard:
                self.guard.begin_tile(self, stage)

            def k_position(column):
                return span.k_offset + tree.position(first, column)

            self.rope.rotate(self.k, stage, tiling.positions, self.threads, k_position)
            with T.If(first < warp_end), T.Then():
                multiply(first, stage, k_position)

        def multiply(first, stage, k_position):
            self.products.scores(scores, self.k, stage)
            if self.scales:
                self.scales.scale_scores(scores, stage, lane)
            self.logits.scale(scores, factor, k_position)
            if self.guard:
                self.guard.mark(self, scores)
            hides_some = T.Or(first + tiling.positions > shared_end, first < shared_begin)
            with T.If(hides_some), T.Then():
                self._hide(scores, first)
            self.softmax.update(scores)
            if self.scales:
                self.scales.scale_weights(scores, self.softmax.output, stage, lane)
            self.products.accumulate(self.softmax.output, scores, self.v, stage)

        self.pipeline.for_tiles(rows, start, end, visit)
        sync_block()

    def _end_of_warp(self):
        """Behind the last column that rows of the warp see; 0 for a warp without rows."""
        last = self._end_of(self.warp_row + self.tiling.warp_rows - 1)
        return index_temp(T.if_then_else(self.has_row(self.warp_row), last, 0))

    def _keep_bounds(self, span: Span) -> None:
        """Find the bounds of all rows: few tiles of columns need them, and registers are scarce."""
        tiling, thread = self.tiling, opaque(self.thread)
        with T.serial(T.ceildiv(tiling.rows, tiling.num_threads)) as turn:
            row = index_temp(turn * tiling.num_threads + thread)
            with T.If(row < tiling.rows), T.Then():
                bounds = self._begin_of(row, span), T.min(self._end_of(row), span.end)
                words = [T.cast(bound, U32) for bound in bounds]
                ptx("st.shared.v2.b32", self.bounds_pointer(row), *words)

    def _hide(self, scores, first) -> None:
        """Hide the columns of the tile from `first` on that a row does not see."""
        rows = self.softmax.rows
        bounds = Registers(2 * rows, U32, "bounds")
        for h in range(rows):
            pair = [bounds[2 * h + i] for i in range(2)]
            ptx("ld.shared.v2.b32", *pair, self.bounds_pointer(self.own_row(h)))

        def is_visible(h, column):
            begin, end = (T.cast(bounds[2 * h + i], I32) for i in range(2))
            is_between = T.And(first + column >= begin, first + column < end)
            return T.And(is_between, self.tree.is_visible(first, column, h))

        self.logits.hide(scores, is_visible)

    def _load_q(self, span: Span) -> None:
        """Bring the rows of Q into shared memory, rotated if it is asked for."""
        chunks, tiling = self.spec.qk_head_dim // self.q.layout.per_chunk, self.tiling

        def pointer(row, chunk):
            column = chunk * self.q.layout.per_chunk
            return self.a.q.ptr_to([*self.output_row(row), column])

        threads = replace(self.threads, thread=opaque(self.thread))
        copy_rows(self.q, tiling.rows, chunks, threads, pointer)
        commit()
        wait(0)
        sync_block()
        self.rope.rotate(
            self.q, 0, tiling.rows, self.threads, lambda row: self._position(row, span)
        )
        if self.q_blocks:
            rotate_rows(self.q, 0, tiling.rows, self.q_blocks, self.threads)
            sync_block()

    def _prepare(self) -> None:
        """Change finished rows and their logs before they are stored."""

    def _again(self) -> None:
        """Find the thread's rows anew, or all that depends on them is kept since the first pass."""
        self._assign_rows(opaque(self.threads.thread))

    def _state_index(self, row) -> tuple:
        """Index of the partial state of a row of the tile."""
        raise NotImplementedError

    def store_lse(self) -> None:
        """Hand out the logs of the rows; where others see more, with their states."""
        self._again()
        is_first = T.And(T.truncmod(self.lane, 4) == 0, self.step.slice == 0)
        lse = self.softmax.lse
        for h in range(self.softmax.rows):
            row = self.own_row(h)
            with T.If(T.And(is_first, self.has_row(row))), T.Then():
                with T.If(self.step.is_whole):
                    with T.Then():
                        T.buffer_store(self.a.lse, lse[h], list(self.output_row(row)))
                    with T.Else():
                        self.step.states.put_lse(self._state_index(row), lse[h])

    def store_rows(self) -> None:
        """Hand out the rows; where others see more, as states."""
        self._again()
        with T.If(self.step.is_whole):
            with T.Then():
                self._put()
            with T.Else():
                self._keep()

    def _keep(self) -> None:
        """Keep the rows, for those that merge them."""
        output, pair = self.softmax.output, Registers(2, F32, "pair")
        quad = T.truncmod(self.lane, 4)
        for h in range(self.softmax.rows):
            row = self.own_row(h)
            index = self._state_index(row)
            with T.If(self.has_row(row)), T.Then(), T.unroll(output.shape[0]) as n:
                with T.If(self.v_begin + n * 8 < self.spec.v_head_dim), T.Then():
                    for e in range(2):
                        pair[e] = output[n, h, e]
                    self.step.states.put(index, self.v_begin + n * 8 + quad * 2, pair)

    def _put(self) -> None:
        """Write the rows of O, through shared memory."""
        tiling, output = self.tiling, self.softmax.output
        with T.unroll(output.shape[0]) as n:
            for h in range(self.softmax.rows):
                column = n * 8 + T.truncmod(self.lane, 4) * 2
                pair = [output[n, h, e] for e in range(2)]
                self.o.store_pair(0, self.own_row(h), column, *pair)
        sync_block()
        chunks, words = self.o.layout.chunks, Registers(4, U32, "words")
        items = tiling.rows * chunks
        with T.serial(T.ceildiv(items, tiling.num_threads)) as turn:
            item = index_temp(turn * tiling.num_threads + self.thread)
            row = index_temp(T.truncdiv(item, chunks))
            chunk = index_temp(T.truncmod(item, chunks))
            is_inside = T.And(row < tiling.rows, self.has_row(row))
            with T.If(T.And(is_inside, chunk < self.o_chunks)), T.Then():
                taken = [words[i] for i in range(4)]
                ptx("ld.shared.v4.b32", *taken, self.o.pointer(0, row, chunk))
                column = self.v_begin + chunk * self.o.layout.per_chunk
                self._put_chunk(row, (*self.output_row(row), column), words)

    def _put_chunk(self, row, index: tuple, words: Registers) -> None:
        """Take 16 bytes of a row of O, from `index` on."""
        store_words(words, self.a.o, index, 16)
