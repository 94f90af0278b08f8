# SPDX-License-Identifier: Apache-2.0
"""Columns of a sequence: consecutive positions, the last of which may be nodes of a tree.

The bounds that a mask gives a row decide where a block looks; the tree decides what a row sees
between them, and at which position RoPE, ALiBi and windows count a column.
"""

from __future__ import annotations

from tvm.script import tirx as T

from ...script import inline
from ...semantics.visibility import NO_LIMIT, first_in_window
from ..registers import I32, U32, Registers
from ..tiles.tiling import Tiling
from .block_memory import BlockMemory
from .query_rows import QueryRows


@T.meta_class
class NoTree:
    """Columns that follow each other: a row sees all between its bounds.

    Attributes
    ----------
    k_offset : int32
        RoPE position of column 0, in kernels that are not told.
    """

    k_offset = 0

    @inline
    def begin_sequence(self, sequence):
        """Load the tree of a sequence."""

    @inline
    def begin(self, k_offset):
        """Start a tile of rows; column 0 of the sequence is at a RoPE position."""

    @inline
    def begin_tile(self, first, rope, has_bias: bool):
        """Start the tile of columns that begins at `first`."""

    def shared_end(self, end):
        """Return where the columns end that all rows see that end at `end` or later."""
        return end

    def shared_begin(self, begin):
        """Return where the columns begin that all rows see that begin at `begin` or earlier."""
        return begin

    def position(self, first, column):
        """Return the position of a column of a tile, relative to the first of the sequence."""
        return first + column

    def is_visible(self, first, column, h):
        """Whether row h of the thread sees a column of the tile that is between its bounds."""
        return T.bool(True)


class TreeMask(NoTree):
    """Columns of which the last ones are the nodes of a tree, as `attention.prefill` says.

    Where depths matter, the threads find those of a tile together and keep them in shared memory.

    Parameters
    ----------
    a : the kernel's arguments
    tiling : Tiling
    rows : QueryRows
    memory : BlockMemory
    """

    def __init__(self, a, tiling: Tiling, rows: QueryRows, memory: BlockMemory):
        self.a, self.order, self.window, self.tiling = a, a.tree_order, a.window, tiling
        self.rows, self.work, self.memory = rows, rows.work, memory
        self.first_node, self.num_nodes, self.start = (T.local_scalar(I32) for _ in range(3))
        self.depth = T.local_scalar(I32)
        self.number = T.alloc_local((rows.count,), I32, layout=None)
        self.first_position = T.alloc_local((rows.count,), I32, layout=None)
        # Ragged K has no positions of its own, unlike that of MLA, which is rotated already.
        self.finds_offset = a.first_positions is None and a.query_positions is not None
        if self.finds_offset:
            self.k_offset = T.local_scalar(I32)

    @inline
    def begin_sequence(self, sequence):
        """Find the tree of a sequence, and for ragged K the position of column 0."""
        self.first_node = self.a.tree_order_indptr[sequence]
        self.num_nodes = self.a.tree_order_indptr[sequence + 1] - self.first_node
        if self.finds_offset:  # such that the first row gets its own position
            behind = self.work.num_rows  # columns from the first row's position on, of a chain
            if self.num_nodes > 0:
                self._find_depth(T.max(self.num_nodes - self.work.num_rows, 0))
                behind = self.num_nodes - self.depth
            own = T.meta_var(self.a.query_positions[self.work.first_row])
            self.k_offset = own - (self.work.kv_len - behind)

    @inline
    def _find_depth(self, node):
        """Find a node's depth: in how many subtrees its number lies, but its own."""
        number = self.order[self.first_node + node, 0]
        self.depth = -1
        for i in T.serial(self.num_nodes):
            subtree = T.meta_var([self.order[self.first_node + i, side] for side in range(2)])
            if T.And(subtree[0] <= number, number < subtree[1]):
                self.depth += 1

    @inline
    def begin(self, k_offset):
        """Find the numbers of the thread's rows."""
        kv_len = T.meta_var(self.work.kv_len)
        self.start = T.if_then_else(self.num_nodes > 0, kv_len - self.num_nodes, kv_len)
        for h in T.unroll(self.rows.count):
            token = T.meta_var(self.rows.token(self.rows.own(h)))
            node = T.meta_var(T.max(kv_len - self.work.num_rows + token - self.start, 0))
            at = T.meta_var(self.first_node + T.min(node, self.num_nodes - 1))
            self.number[h] = T.if_then_else(self.num_nodes > 0, self.order[at, 0], 0)
            if self.window is not None:
                position = T.meta_var(self.a.query_positions[self.work.first_row + token])
                self.first_position[h] = first_in_window(self.window, position) - k_offset

    @inline
    def begin_tile(self, first, rope, has_bias: bool):
        """Find the positions of the tile's columns, where they matter."""
        if self.window is not None or has_bias:
            self._find_positions(first)
        elif rope.may_rotate:
            if rope.mode == 1:
                self._find_positions(first)

    @inline
    def _find_positions(self, first):
        for turn in T.serial(T.ceildiv(self.tiling.positions, self.tiling.num_threads)):
            i = turn * self.tiling.num_threads + self.rows.thread
            if i < self.tiling.positions:
                position = first + i
                node = first + i - self.start
                if T.And(node >= 0, node < self.num_nodes):
                    self._find_depth(node)
                    position = self.start + self.depth
                self.memory.shared.store(self.memory.position(i), T.cast(position, U32))
        self.memory.isa.sync_block()

    def shared_end(self, end):
        """Return where the nodes begin at the latest, of which rows see different ones."""
        return T.min(end, self.start)

    def shared_begin(self, begin):
        """Return no limit with a window: rows then begin at different columns."""
        return begin if self.window is None else T.int32(NO_LIMIT)

    def position(self, first, column):
        """Return the position of a column; a node's is that of the tree's begin plus its depth."""
        word = Registers(1, U32, "position")
        self.memory.shared.load([*word], self.memory.position(column))
        return T.cast(word[0], I32)

    def is_visible(self, first, column, h):
        """Return whether a row sees a column; it sees its ancestors among the nodes, and itself."""
        node = first + column - self.start
        begins, ends = (self.order[self.first_node + node, side] for side in range(2))
        number = self.number[h]
        seen = T.if_then_else(node >= 0, T.And(begins <= number, number < ends), T.bool(True))
        if self.window is None:
            return seen
        return T.And(self.position(first, column) >= self.first_position[h], seen)
