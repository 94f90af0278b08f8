# SPDX-License-Identifier: Apache-2.0
"""Columns that the rows of a tile see: causal masks, windows, dropped positions, token trees."""

from __future__ import annotations

from collections.abc import Callable

from tvm.script import tirx as T

from ...script import inline
from ...semantics.sequence_gap import SequenceGap
from ...semantics.visibility import CausalMask, Span, WholeSequence
from ..registers import I32, U32, Registers
from ..tiles.tiling import Tiling
from .block_memory import BlockMemory
from .query_rows import QueryRows


@T.meta_class
class TileMask:
    """The columns of a span that the rows of a tile see.

    A sequence is one span of columns, or two where it has dropped positions. All rows see all
    columns between `shared_begin` and `shared_end`; few tiles of columns are not between them, so
    the bounds of each row stay in shared memory, since registers are scarce.

    Parameters
    ----------
    visible : CausalMask
        The bounds of a row.
    sequences : WholeSequence
        Which positions a sequence has dropped.
    a : the kernel's argument `first_positions`, or none.
    tree : NoTree or TreeMask
    tiling : Tiling
    rows : QueryRows
    memory : BlockMemory

    Attributes
    ----------
    gap : SequenceGap
    k_offset : int32
        RoPE position of column 0.
    start, end : int32
        The columns ``start .. end - 1`` of the span are attended to by the block.
    joint_end : int32
        Behind the last column that rows of warps that multiply together see; 0 if there are none.
    """

    def __init__(
        self,
        visible: CausalMask,
        sequences: WholeSequence,
        a,
        tree,
        tiling: Tiling,
        rows: QueryRows,
        memory: BlockMemory,
    ):
        self.visible, self.tree, self.tiling = visible, tree, tiling
        self.rows, self.work, self.memory = rows, rows.work, memory
        self.k_offsets = a.first_positions
        self.k_offset, self.start, self.end = (T.local_scalar(I32) for _ in range(3))
        self.shared_begin, self.shared_end = (T.local_scalar(I32) for _ in range(2))
        self.joint_end = T.local_scalar(I32)
        self.gap = SequenceGap(sequences)

    @inline
    def begin(self, sequence):
        """Load the RoPE position of column 0 and the gap of a sequence."""
        if self.k_offsets is None:
            self.k_offset = self.tree.k_offset
        else:
            self.k_offset = self.k_offsets[sequence]
        self.gap.begin(sequence)

    def span(self, i) -> Span:
        """Return a span of the sequence."""
        return self.gap.span(i, self.work.kv_len, self.k_offset)

    def begin_span(self, i) -> Span:
        """Find the columns of a span that the block attends to."""
        self.memory.reload()
        span = self.span(i)
        self._find_columns(span)
        return span

    def end_span(self) -> None:
        """Forget what `begin_span` found, so that no register keeps it."""
        self.memory.reload()

    def row_position(self, span: Span, q_position: Callable, row):
        """Return the RoPE position of a row of the tile; `q_position` is that of a row of Q."""
        own = q_position(self.rows.row_of_q(row))
        return own if span.begin is None else T.min(own, span.last_position)

    def position_of(self, span: Span, first) -> Callable:
        """Return the function from columns of the tile at `first` to their RoPE positions."""
        return lambda column: span.k_offset + self.tree.position(first, column)

    def _visible(self) -> CausalMask:
        return self.visible.of_sequence(self.k_offset, self.work.first_row)

    def row_end(self, row):
        """Return the column after the last one that a row of the tile sees."""
        work = self.work
        return self._visible().end(self.rows.token(row), work.num_rows, work.kv_len)

    def row_begin(self, row, span: Span):
        """Return the first column of a span that a row of the tile sees."""
        arguments = self.rows.token(row), self.work.num_rows, self.work.kv_len
        begin = T.int32(0)
        if self.visible.has_window:
            begin = self._visible().begin(*arguments)
        if span.begin is None:
            return begin
        return T.max(begin, span.first_seen(self.visible.own(*arguments)))

    @inline
    def _find_columns(self, span):
        self.start = self.row_begin(0, span)
        self.end = T.min(self.row_end(self.tiling.rows - 1), span.end)
        self.work.clip(self)

    @inline
    def keep_bounds(self, span, thread):
        """Find the bounds of all rows in a span."""
        shared_end = T.meta_var(self.visible.shared_end(self.row_end(0)))
        self.shared_end = T.min(self.tree.shared_end(shared_end), span.end)
        self.shared_begin = self.tree.shared_begin(self.row_begin(self.tiling.rows - 1, span))
        first = T.meta_var(self.rows.joint_row)
        last = T.meta_var(first + self.tiling.joint_rows - 1)
        self.joint_end = T.if_then_else(self.rows.exists(first), self.row_end(last), 0)
        own = self.memory.isa.opaque(thread)
        for turn in T.serial(T.ceildiv(self.tiling.rows, self.tiling.num_threads)):
            row = turn * self.tiling.num_threads + own
            if row < self.tiling.rows:
                begin = T.meta_var(T.cast(self.row_begin(row, span), U32))
                end = T.meta_var(T.cast(T.min(self.row_end(row), span.end), U32))
                self.memory.shared.store(self.memory.bounds(row), begin, end)

    def hides_some(self, first):
        """Whether a row does not see some column of the tile that begins at `first`."""
        is_beyond = first + self.tiling.positions > self.shared_end
        return T.Or(is_beyond, first < self.shared_begin)

    @inline
    def hide(self, logits, scores, first):
        """Hide the columns of the tile that begins at `first` that a row does not see."""
        bounds = T.meta_var(self._own_bounds())
        logits.hide(scores, lambda h, column: self._is_visible(bounds, first, h, column))

    def _own_bounds(self) -> Registers:
        bounds = Registers(2 * self.rows.count, U32, "bounds")
        for h in range(self.rows.count):
            pair = [bounds[2 * h + i] for i in range(2)]
            self.memory.shared.load(pair, self.memory.bounds(self.rows.own(h)))
        return bounds

    def _is_visible(self, bounds: Registers, first, h, column):
        begin, end = (T.cast(bounds[2 * h + i], I32) for i in range(2))
        is_between = T.And(first + column >= begin, first + column < end)
        if self.visible.sees is not None:
            token, work = self.rows.token(self.rows.own(h)), self.work
            own = self.visible.own(token, work.num_rows, work.kv_len)
            is_between = T.And(is_between, self.visible.sees(own, first + column, 1))
        return T.And(is_between, self.tree.is_visible(first, column, h))
