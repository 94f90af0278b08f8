# SPDX-License-Identifier: Apache-2.0
"""Columns of a sequence: consecutive positions, the last of which may be nodes of a tree.

The bounds that a mask gives a row decide where a block looks; the tree decides what a row sees
between them, and at which position RoPE, ALiBi and windows count a column.
"""

from __future__ import annotations

from tvm.script import tirx as T

from ...semantics.visibility import NO_LIMIT
from ..emit import U32, Registers, Variable, index_temp, ptx, sync_block


class NoTree:
    """Columns that follow each other: a row sees all between its bounds."""

    def begin(self, tile) -> None:
        """Go on with a tile of rows."""

    def begin_tile(self, tile, first) -> None:
        """Go on with the columns from `first` on."""

    def shared_end(self, end):
        """All columns before it are seen by rows that end there or later."""
        return end

    def shared_begin(self, begin):
        """All columns from it on are seen by rows that begin there or earlier."""
        return begin

    def position(self, first, column):
        """Position of a column of the tile, relative to the first one of the sequence."""
        return first + column

    def is_visible(self, first, column, h: int):
        """Whether row h of the thread sees a column of the tile that is between its bounds."""
        return T.bool(True)


class TreeMask(NoTree):
    """Columns of which the last ones are the nodes of a tree, as `signatures.tree` says.

    Where depths matter, the threads find those of a tile together and keep them in shared memory.

    Parameters
    ----------
    a : the kernel's arguments `tree_order_indptr`, `tree_order`; perhaps `window`.
    """

    def __init__(self, a):
        self.a, self.window = a, a.window
        self.indptr, self.order = a.tree_order_indptr, a.tree_order

    def begin(self, tile) -> None:
        """Find the tree of the tile's sequence, and the numbers of the thread's rows."""
        step = tile.step
        self.first_node, self.num_nodes = self._nodes_of(step.sequence)
        self.num_nodes = index_temp(self.num_nodes)
        self.tree_start = index_temp(
            T.if_then_else(self.num_nodes > 0, step.kv_len - self.num_nodes, step.kv_len)
        )
        self.number, self.first_position = (
            Registers(tile.softmax.rows, "int32", name) for name in ("number", "first_position")
        )
        for h in range(tile.softmax.rows):
            token = tile.token(tile.own_row(h))
            node = T.max(step.kv_len - step.num_rows + token - self.tree_start, 0)
            at = self.first_node + T.min(node, self.num_nodes - 1)
            self.number[h] = T.if_then_else(self.num_nodes > 0, self.order[at, 0], 0)
            if self.window is not None:
                own = self.a.q_rope_position[step.first_row + token] - step.k_offset
                self.first_position[h] = own + 1 - self.window

    def _nodes_of(self, sequence):
        first = index_temp(self.indptr[sequence])
        return first, index_temp(self.indptr[sequence + 1] - first)

    def depth(self, first_node, num_nodes, node):
        """A node's depth: in how many subtrees its number lies, but its own."""
        number = index_temp(self.order[first_node + node, 0])
        depth = Variable(T.int32(-1))
        with T.serial(num_nodes) as i:
            begins, ends = (self.order[first_node + i, side] for side in range(2))
            with T.If(T.And(begins <= number, number < ends)), T.Then():
                depth.set(depth.get() + 1)
        return depth.get()

    def first_of_ragged(self, sequence):
        """Position of column 0 of ragged K, such that the first row gets its own position."""
        a = self.a
        num_rows = index_temp(a.q_indptr[sequence + 1] - a.q_indptr[sequence])
        kv_len = index_temp(a.kv_indptr[sequence + 1] - a.kv_indptr[sequence])
        first_node, num_nodes = self._nodes_of(sequence)
        behind = Variable(num_rows)  # columns from the first row's position on, of a chain
        with T.If(num_nodes > 0), T.Then():
            node = T.max(num_nodes - num_rows, 0)
            behind.set(num_nodes - self.depth(first_node, num_nodes, node))
        return index_temp(a.q_rope_position[a.q_indptr[sequence]] - (kv_len - behind.get()))

    def begin_tile(self, tile, first) -> None:
        """Find the positions of the tile's columns, where they matter."""
        if self.window is not None or tile.logits.has_alibi:
            self._find_positions(tile, first)
        elif tile.rope.may_rotate:
            with T.If(tile.rope.mode == 1), T.Then():
                self._find_positions(tile, first)

    def _find_positions(self, tile, first) -> None:
        self.table = tile.table
        with T.serial(T.ceildiv(tile.tiling.positions, tile.tiling.num_threads)) as turn:
            i = index_temp(turn * tile.tiling.num_threads + tile.thread)
            with T.If(i < tile.tiling.positions), T.Then():
                position = Variable(first + i)
                node = index_temp(first + i - self.tree_start)
                with T.If(T.And(node >= 0, node < self.num_nodes)), T.Then():
                    depth = self.depth(self.first_node, self.num_nodes, node)
                    position.set(self.tree_start + depth)
                ptx("st.shared.b32", self.table(i), T.cast(position.get(), U32))
        sync_block()

    def shared_end(self, end):
        """Rows see different nodes of the tree."""
        return T.min(end, self.tree_start)

    def shared_begin(self, begin):
        """Return no limit with a window: rows then begin at different columns."""
        return begin if self.window is None else T.int32(NO_LIMIT)

    def position(self, first, column):
        """Nodes are as far behind the columns before the tree as they are deep."""
        word = Registers(1, U32, "position")
        ptx("ld.shared.b32", word[0], self.table(column))
        return T.cast(word[0], "int32")

    def is_visible(self, first, column, h: int):
        """Return whether a row sees a column; it sees its ancestors among the nodes, and itself."""
        node = first + column - self.tree_start
        at = self.first_node + node
        begins, ends = (self.order[at, side] for side in range(2))
        number = self.number[h]
        seen = T.if_then_else(node >= 0, T.And(begins <= number, number < ends), T.bool(True))
        if self.window is None:
            return seen
        return T.And(self.position(first, column) >= self.first_position[h], seen)
