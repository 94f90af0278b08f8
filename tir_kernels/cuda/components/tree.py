# SPDX-License-Identifier: Apache-2.0
"""Columns of a sequence: consecutive positions, the last of which may be nodes of a tree.

The bounds that a mask gives a row decide where a block looks; the tree decides what a row sees
between them, and at which position RoPE, ALiBi and windows count a column.
"""

from __future__ import annotations

from tvm.script import tirx as T

from ...script import inline
from ...semantics.visibility import NO_LIMIT
from ..emit import I32, U32, Registers, Variable, index_temp, ptx, sync_block
from ..tiles.tiling import Tiling
from .block_memory import BlockMemory
from .query_rows import QueryRows


@T.meta_class
class NoTree:
    """Columns that follow each other: a row sees all between its bounds."""

    @inline
    def begin(self, sequence, k_offset):
        """Go on with a sequence, whose column 0 is at a RoPE position."""

    @inline
    def begin_tile(self, first, rope, has_bias: bool):
        """Go on with the columns from `first` on."""

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
    nodes : TreeNodes
    window, q_rope_position : the kernel's arguments; the window may be None.
    tiling : Tiling
    rows : QueryRows
    memory : BlockMemory
    """

    def __init__(
        self,
        nodes: TreeNodes,
        window,
        q_rope_position,
        tiling: Tiling,
        rows: QueryRows,
        memory: BlockMemory,
    ):
        self.nodes, self.window, self.q_rope_position = nodes, window, q_rope_position
        self.tiling, self.rows, self.work, self.memory = tiling, rows, rows.work, memory
        self.first_node, self.num_nodes, self.start = (T.local_scalar(I32) for _ in range(3))
        self.number = T.alloc_local((rows.count,), I32, layout=None)
        self.first_position = T.alloc_local((rows.count,), I32, layout=None)

    @inline
    def begin(self, sequence, k_offset):
        """Find the tree of a sequence, and the numbers of the thread's rows."""
        self.first_node = self.nodes.indptr[sequence]
        self.num_nodes = self.nodes.indptr[sequence + 1] - self.first_node
        kv_len = T.meta_var(self.work.kv_len)
        self.start = T.if_then_else(self.num_nodes > 0, kv_len - self.num_nodes, kv_len)
        for h in T.unroll(self.rows.count):
            token = T.meta_var(self.rows.token(self.rows.own(h)))
            node = T.meta_var(T.max(kv_len - self.work.num_rows + token - self.start, 0))
            at = T.meta_var(self.first_node + T.min(node, self.num_nodes - 1))
            self.number[h] = T.if_then_else(self.num_nodes > 0, self.nodes.order[at, 0], 0)
            if self.window is not None:
                own = T.meta_var(self.q_rope_position[self.work.first_row + token] - k_offset)
                self.first_position[h] = own + 1 - self.window

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
                    depth = T.meta_var(self.nodes.depth(self.first_node, self.num_nodes, node))
                    position = self.start + depth
                ptx("st.shared.b32", self.memory.position(i), T.cast(position, U32))
        sync_block()

    def shared_end(self, end):
        """Return where the nodes begin at the latest, of which rows see different ones."""
        return T.min(end, self.start)

    def shared_begin(self, begin):
        """Return no limit with a window: rows then begin at different columns."""
        return begin if self.window is None else T.int32(NO_LIMIT)

    def position(self, first, column):
        """Nodes are as far behind the columns before the tree as they are deep."""
        word = Registers(1, U32, "position")
        ptx("ld.shared.b32", word[0], self.memory.position(column))
        return T.cast(word[0], I32)

    def is_visible(self, first, column, h):
        """Return whether a row sees a column; it sees its ancestors among the nodes, and itself."""
        node = first + column - self.start
        at = self.first_node + node
        begins, ends = (self.nodes.order[at, side] for side in range(2))
        number = self.number[h]
        seen = T.if_then_else(node >= 0, T.And(begins <= number, number < ends), T.bool(True))
        if self.window is None:
            return seen
        return T.And(self.position(first, column) >= self.first_position[h], seen)


def tree_mask(
    nodes: TreeNodes | None, a, tiling: Tiling, rows: QueryRows, memory: BlockMemory
) -> NoTree:
    """Make the component for the trees of a call, whose other arguments are `a`; None: no trees."""
    if nodes is None:
        return NoTree()
    return TreeMask(nodes, a.window, a.q_rope_position, tiling, rows, memory)


class TreeNodes:
    """The nodes of the trees of a batch.

    Parameters
    ----------
    indptr, order : the kernel's arguments `tree_order_indptr` and `tree_order`.
    """

    def __init__(self, indptr, order):
        self.indptr, self.order = indptr, order

    def of(self, sequence) -> tuple:
        """Return the first node of a sequence and the number of its nodes."""
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

    def first_of_ragged(self, sequence, q_indptr, kv_indptr, q_rope_position):
        """Position of column 0 of ragged K, such that the first row gets its own position."""
        num_rows = index_temp(q_indptr[sequence + 1] - q_indptr[sequence])
        kv_len = index_temp(kv_indptr[sequence + 1] - kv_indptr[sequence])
        first_node, num_nodes = self.of(sequence)
        behind = Variable(num_rows)  # columns from the first row's position on, of a chain
        with T.If(num_nodes > 0), T.Then():
            node = T.max(num_nodes - num_rows, 0)
            behind.set(num_nodes - self.depth(first_node, num_nodes, node))
        return index_temp(q_rope_position[q_indptr[sequence]] - (kv_len - behind.get()))
