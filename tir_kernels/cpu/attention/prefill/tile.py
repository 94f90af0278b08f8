# SPDX-License-Identifier: Apache-2.0
"""A tile of a sequence's tokens, with the query heads of one KV head, over all that they see."""

from __future__ import annotations

from tvm.script import tirx as T

from ....semantics.softmax import HIDDEN, inverse_total, log_sum
from ....semantics.visibility import Span
from ....signatures.inputs import AttentionInputs
from ....spec import LOG2E, KernelSpec
from ...columns import chunks, for_columns
from ...components.online_softmax import OnlineSoftmax
from ...matmul_tile import UNROLL, multiply_tile
from ...simd import F32, Register, broadcast, constant, index_temp, load, store, temp
from ...soft_cap import soft_cap
from ..alibi import AlibiBias
from .masked_values import MaskedValues
from .packed_kv import PackedKv
from .row_bounds import RowBounds
from .tile_view import TileRows, TileView
from .tiling import POSITIONS, VECTORS, PrefillStep, Tiling

UNSEEN, BEGUN, STORED = range(3)  # how far a block of rows is
BLOCKS = 4  # register tiles of rows that use a part of K or V while it is in L1


class PrefillTile:
    """The buffers of a task and what it does with them for one tile after another.

    Parameters
    ----------
    spec : KernelSpec
    ops : operands object
    min_rows : int, optional
        Rows that `o` has at least.
    """

    def __init__(self, spec: KernelSpec, ops, min_rows: int = 0):
        self.spec, self.ops, self.lanes = spec, ops, spec.target.lanes
        self.tiling = tiling = Tiling.of(spec)
        self.depth = spec.qk_head_dim // ops.numbers
        rows = tiling.num_blocks * tiling.rows
        self.q = T.alloc_buffer((rows, self.depth), ops.dtype)
        self.kv = PackedKv(spec, ops)
        self.o = T.alloc_buffer((max(rows, min_rows), spec.v_head_dim), F32)
        self.rotated_q = T.alloc_buffer((-(-spec.qk_head_dim // 32) * 32,), F32)
        rows_at_once = BLOCKS * tiling.rows
        self.scores = T.alloc_buffer((rows_at_once, POSITIONS), F32)
        self.weights = (
            self.scores
            if ops.dtype == F32
            else T.alloc_buffer((rows_at_once, POSITIONS // ops.numbers), ops.dtype)
        )
        self.state = OnlineSoftmax(tiling.num_blocks, tiling.rows, self.lanes)
        self.bias = AlibiBias.of(spec, rows)
        self.inverse = T.alloc_buffer((rows_at_once,), F32)
        self.progress = T.alloc_buffer((tiling.num_blocks,), "int32")
        self.num_packed, self.is_new = (Register(1, "int32", T.int32(0)) for _ in range(2))
        self.masked_values = MaskedValues(spec, ops, self.kv.v, VECTORS)

    def run(self, a: AttentionInputs, step: PrefillStep) -> None:
        """Attend and store.

        Parameters
        ----------
        a : the kernel's arguments.
        step : PrefillStep
        """
        tiling, group = self.tiling, self.spec.group_size
        num_rows = index_temp(step.num_tokens * group)
        num_blocks = index_temp((num_rows + tiling.rows - 1) // tiling.rows)
        factor = temp(a.sm_scale * T.float32(LOG2E))

        def at(row):
            """Token and query head of a row; rows past the end repeat the last row."""
            source = index_temp(T.min(row, num_rows - 1))
            token = index_temp(step.first_row + step.first_token + source // group)
            return token, index_temp(step.head * group + source % group)

        with T.serial(num_blocks) as block:
            self.state.reset(block)
            T.buffer_store(self.progress, T.int32(UNSEEN), [block])

        def run_span(span):
            rows = TileRows(a, at, None if step.gap is None else span.last_position)
            self.num_packed.set(0)
            self.run_span(a, step, span, num_rows, num_blocks, factor, rows)

        if step.gap is None:
            run_span(Span.whole(step.kv_len, step.k_offset))
        else:
            step.gap.for_spans(step.kv_len, step.k_offset, run_span)
        with T.serial(num_blocks) as block:  # whose rows see nothing, or are to be restored
            with T.If(self.progress[block] != STORED), T.Then(), T.serial(tiling.rows) as i:
                row = index_temp(block * tiling.rows + i)
                with T.If(self.progress[block] == UNSEEN), T.Then():
                    self.clear(row)
                a.rope.restore(self.o, row)
                self.store_row(a, row, *at(row))

    def run_span(
        self, a, step: PrefillStep, span: Span, num_rows, num_blocks, factor, rows: TileRows
    ) -> None:
        """Attend to the columns of a span; without a `begin` these are all."""
        group = self.spec.group_size

        def token_of(row):
            return step.first_token + T.min(row, num_rows - 1) // group

        def end_of(row):
            return a.mask.end(token_of(row), step.num_rows, step.kv_len)

        def begin_of(row):
            if a.mask.has_window:
                return a.mask.begin(token_of(row), step.num_rows, step.kv_len)
            own = a.mask.own(token_of(row), step.num_rows, step.kv_len)
            return span.first_seen(own)

        has_begin = a.mask.has_window or span.begin is not None
        bounds = RowBounds(a.mask, span, end_of, begin_of if has_begin else None)
        last = index_temp(T.min(end_of(num_rows - 1), span.end))
        start = 0
        if has_begin:  # at a whole vector of K
            start = index_temp(begin_of(0) // self.lanes * self.lanes)
            last = T.max(start, last)
        with T.serial((last - start + POSITIONS - 1) // POSITIONS) as i:
            first = index_temp(start + i * POSITIONS)
            self.kv.pack(a, step.rows, first, span)
            self.attend(a, first, num_blocks, bounds, factor, rows)

    def load_q(self, a, row, token, head, factor) -> None:
        """Pack a row of Q and clear its sums."""
        self.pack_q(a, row, token, head, factor)
        self.clear(row)

    def clear(self, row) -> None:
        """Clear the sums of a row."""
        for c in chunks(self.spec.v_head_dim, self.lanes):
            store(self.o, (row, c.start), c.lanes, constant(0.0, c.lanes))

    def pack_q(self, a, row, token, head, factor, last_position=None) -> None:
        """Pack a row of Q, which has its position, or `last_position` where that is less."""
        parts, ops = chunks(self.depth, self.lanes), self.ops

        def position():
            own = a.q_position(token)
            return own if last_position is None else T.min(own, last_position)

        def plain():
            for c in parts:
                q = ops.load_q(a.q, (token, head, c.start), c.lanes, factor)
                store(self.q, (row, c.start), c.lanes, q, ops.dtype)

        def rotated():
            a.rope.begin_row(token, position)
            a.rope.rotate_row(
                lambda column, lanes: load(a.q, (token, head, column), lanes),
                lambda column, lanes, value: store(self.rotated_q, (column,), lanes, value),
            )
            for c in parts:
                q = ops.load_rotated_q(self.rotated_q, c.start, c.lanes, factor)
                store(self.q, (row, c.start), c.lanes, q, ops.dtype)

        a.rope.for_q(rotated, plain)
        if self.bias:
            self.bias.set_row(row, head, position())

    def attend(
        self, a, first, num_blocks, bounds: RowBounds, factor, tile_rows: TileRows | None = None
    ) -> None:
        """Take the packed tile, from `first` on, into the sums of all rows that see some of it.

        With `tile_rows`, Q is packed where it is seen first, and O stored where it is complete.
        """
        rows = self.tiling.rows
        is_masked = bounds.hides_some(first, 0, num_blocks * rows - 1)
        self.masked_values.look(is_masked, self.kv.num_positions)
        num_products = num_blocks * (POSITIONS // (VECTORS * self.lanes))
        prefetched_rows = self.kv.rows_per_product(num_products)
        with T.serial((num_blocks + BLOCKS - 1) // BLOCKS) as i:
            block = index_temp(i * BLOCKS)
            count = index_temp(T.min(BLOCKS, num_blocks - block))
            first_row, last_row = block * rows, (block + count) * rows - 1
            with T.If(bounds.sees_some(first, first_row, last_row)), T.Then():
                view = TileView(
                    block=block,
                    count=count,
                    num_all=num_blocks,
                    prefetched_rows=prefetched_rows,
                    first=first,
                    first_row=index_temp(first_row),
                    bounds=bounds,
                    factor=factor,
                    rows=tile_rows,
                )
                if tile_rows:
                    self._pack_block_rows(view)
                self._attend(a, view)

    def _pack_block_rows(self, view: TileView) -> None:
        """Pack the rows of Q of blocks that have not seen any columns yet."""
        rows, q = self.tiling.rows, view.rows
        self.is_new.set(T.if_then_else(self.progress[view.block] == UNSEEN, 1, 0))
        with T.If(self.is_new.get() == 1), T.Then(), T.serial(view.count) as j:
            T.buffer_store(self.progress, T.int32(BEGUN), [view.block + j])
        with T.If(view.block >= self.num_packed.get()), T.Then():
            self.num_packed.set(view.block + view.count)
            with T.serial(view.count * rows) as i:
                row = index_temp(view.first_row + i)
                self.pack_q(q.a, row, *q.at(row), view.factor, q.last_position)

    def _prefetch_rows(self, view: TileView, product) -> None:
        """Prefetch some of the rows of Q that are packed next, with one of the products."""
        count = self.tiling.rows * VECTORS * self.lanes // POSITIONS
        q, end = view.rows, view.block + view.count
        is_next = T.And(end == self.num_packed.get(), end < view.num_all)
        with T.If(is_next), T.Then():
            q.prefetch(end * self.tiling.rows + product * count, count)

    def _finish_blocks(self, view: TileView) -> None:
        """Store LSE of complete blocks, and what their rows of O are to be divided by."""
        rows = self.tiling.rows

        def finish(j):
            T.buffer_store(self.progress, T.int32(STORED), [view.block + j])
            with T.serial(rows) as i:
                state = self.state.index(view.block + j, i)
                total = temp(self.state.row_sum[state])
                T.buffer_store(self.inverse, inverse_total(total), [j * rows + i])
                lse = log_sum(self.state.row_max[state], total)
                at = view.rows.at(view.first_row + j * rows + i)
                T.buffer_store(view.rows.a.lse, lse, list(at))

        with T.serial(view.count) as j:
            view.either(j * rows + rows - 1, lambda: finish(j), lambda: None)

    def _attend(self, a, view: TileView) -> None:
        """Take a packed tile into the sums of some blocks of rows: the steps of online softmax."""
        last_row = index_temp(view.count * self.tiling.rows - 1)
        self._multiply_q_k(view, last_row)
        if self.bias:
            self._add_bias(a, view)
        last = view.first_row + last_row
        hides_some = temp(view.bounds.hides_some(view.first, view.first_row, last), 1, "bool")
        with T.If(hides_some), T.Then():
            self._hide(view)
        self._softmax(view)
        if view.rows:
            self._finish_blocks(view)
        with T.If(T.And(hides_some, self.masked_values.is_special)):
            with T.Then():
                self._add_some_of_v(view)
            with T.Else():
                self._add_weighted_v(view)

    def _multiply_q_k(self, view: TileView, last_row) -> None:
        """``S = Q K^T``, scaled and capped; rows of the next tile are prefetched meanwhile."""
        rows, ops, width = self.tiling.rows, self.ops, VECTORS * self.lanes

        def logit(value, lanes: int):
            value = value if ops.scale_in_q else value * broadcast(view.factor, lanes)
            return soft_cap(value, self.spec.logit_softcap, lanes)

        def score_tile(row, start, parts):
            multiply_tile(
                lambda i, k: self.q[view.first_row + row + i, k],
                lambda k, c: self.kv.k.at(k, start + c.start),
                self.depth,
                rows=rows,
                parts=parts,
                start=lambda i, c: constant(0.0, c.lanes),
                finish=lambda i, c, value: store(
                    self.scores, (row + i, start + c.start), c.lanes, logit(value, c.lanes)
                ),
                ops=ops,
            )

        def scores(row, start, num_columns):
            whole, narrow = chunks(width, self.lanes), chunks(self.lanes, self.lanes)
            with T.If(num_columns > self.lanes):
                with T.Then():
                    score_tile(row, start, whole)
                with T.Else():  # on the diagonal
                    score_tile(row, start, narrow)

        with T.serial((view.num_seen(last_row) + width - 1) // width) as i:
            with T.serial(view.count) as j:
                num_columns = index_temp(view.num_seen(j * rows + rows - 1) - i * width)
                with T.If(num_columns > 0), T.Then():
                    self.kv.prefetch(i * view.num_all + view.block + j, view.prefetched_rows)
                    if view.rows:
                        self._prefetch_rows(view, i * view.count + j)
                    scores(index_temp(j * rows), i * width, num_columns)

    def _add_bias(self, a, view: TileView) -> None:
        """Add the ALiBi bias to the scores."""
        with T.serial(view.count * self.tiling.rows) as i:
            position = self.kv.first_position
            self.bias.add(view.first_row + i, self.scores, i, position, a.mask.offsets)

    def _hide(self, view: TileView) -> None:
        """Hide the scores of columns that a row does not see."""
        with T.serial(view.count * self.tiling.rows) as i:
            visible = view.bounds.visible_to(view.first_row + i, view.first)
            for c in chunks(POSITIONS, self.lanes):
                score = load(self.scores, (i, c.start), self.lanes)
                hidden = constant(HIDDEN, self.lanes)
                score = T.Select(visible(c.start, self.lanes), score, hidden)
                store(self.scores, (i, c.start), self.lanes, score)

    def _softmax(self, view: TileView) -> None:
        """Turn scores into weights, and update the maxima and sums of the rows."""
        with T.serial(view.count) as j:
            row = index_temp(j * self.tiling.rows)
            self.state.update(view.block + j, self.scores, row, self.weights, self.ops)

    def _rescale_of(self, view: TileView, row, i):
        """Return the factor of the previous sums of row ``row + i``."""
        return self.state.rescale[self.state.index(view.block + row // self.tiling.rows, i)]

    def _add_weighted_v(self, view: TileView) -> None:
        """``O = O * rescale + P V``."""
        rows, ops, step = self.tiling.rows, self.ops, UNROLL * self.ops.numbers

        def columns(start, parts):
            with T.serial(view.count) as j:
                row = index_temp(j * rows)
                depth = index_temp((view.num_seen(row + rows - 1) + step - 1) // step * UNROLL)
                totals = []
                multiply_tile(
                    lambda i, k: self.weights[row + i, k],
                    lambda k, c: self.kv.v.at(k, start + c.start),
                    depth,
                    rows=rows,
                    parts=parts,
                    start=lambda i, c: (
                        load(self.o, (view.first_row + row + i, start + c.start), c.lanes)
                        * broadcast(self._rescale_of(view, row, i), c.lanes)
                    ),
                    finish=lambda i, c, value: totals.append((i, c, value)),
                    is_zero=self.is_new.get() == 1 if view.rows else None,
                    ops=ops,
                )

                def put():
                    for i, c, value in totals:
                        store(self.o, (view.first_row + row + i, start + c.start), c.lanes, value)

                def put_output():
                    at = [view.rows.at(view.first_row + row + i) for i in range(rows)]
                    for i, c, value in totals:
                        o = value * broadcast(self.inverse[row + i], c.lanes)
                        store(view.rows.a.o, (*at[i], start + c.start), c.lanes, o)

                view.either(row + rows - 1, put_output, put)

        for_columns(self.spec.v_head_dim, self.lanes, VECTORS, columns)

    def _add_some_of_v(self, view: TileView) -> None:
        """Do what `_add_weighted_v` does where V is not finite: row by row, over what it sees."""
        rows = self.tiling.rows
        with T.serial(view.count * rows) as i:
            if view.rows:
                with T.If(self.is_new.get() == 1), T.Then():
                    self.clear(view.first_row + i)
            visible = view.bounds.visible_to(view.first_row + i, view.first)
            self.masked_values.add_row(
                self.o,
                view.first_row + i,
                temp(self._rescale_of(view, i, i % rows)),
                POSITIONS // self.ops.numbers,
                lambda element: self.weights[i, element],
                lambda column: visible(column, 1),
            )

            def put_output():
                row = index_temp(view.first_row + i)
                self.store_row(view.rows.a, row, *view.rows.at(row))

            view.either(i // rows * rows + rows - 1, put_output, lambda: None)

    def store_row(self, a, row, token, head) -> None:
        """Divide a row by its sum and store it."""
        state = self.state.index(row // self.tiling.rows, row % self.tiling.rows)
        total = temp(self.state.row_sum[state])
        inverse = temp(inverse_total(total))
        for c in chunks(self.spec.v_head_dim, self.lanes):
            o = load(self.o, (row, c.start), c.lanes) * broadcast(inverse, c.lanes)
            store(a.o, (token, head, c.start), c.lanes, o)
        T.buffer_store(a.lse, log_sum(self.state.row_max[state], total), [token, head])
