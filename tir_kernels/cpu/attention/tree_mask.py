# SPDX-License-Identifier: Apache-2.0
"""Masks of token trees: a node sees the columns before the tree, its ancestors and itself.

The nodes of a sequence's tree are its last columns, in order of appending, parents before their
children. The order of a node is its depth-first number and the end of its subtree, so that node j
is an ancestor of node i, or i itself, where ``order[j, 0] <= order[i, 0] < order[j, 1]``.
"""

from __future__ import annotations

from tvm.script import tirx as T

from ...semantics.visibility import CausalMask
from ..simd import Register, broadcast, index_temp, load, temp

_NEVER = (1 << 31) - 1


class TreeMask(CausalMask):
    """The mask of a batch in which every sequence has a tree, or none and is plain causal.

    A node whose interval is empty sees its ancestors, but is seen by nobody. A tile of columns is
    described once, by the interval of depth-first numbers that see each column, and then serves all
    rows. Tiles whose rows see every column skip the mask.

    Parameters
    ----------
    a : the kernel's arguments `tree_order_indptr` and `tree_order`: the nodes of each sequence, and
        their order.
    tile : int
        Columns of a tile.
    """

    def __init__(self, a, tile: int):
        super().__init__(T.int32(1))
        self.tile = tile
        self.indptr, self.order = a.tree_order_indptr, a.tree_order

    # Whether depths decide about more than RoPE.
    has_window = False

    def prepare(self, a) -> None:
        """Check the sizes of the trees and compute the depths of their nodes, for positions."""
        self.depth, self.count = (
            T.alloc_buffer((self.order.shape[0] + 1,), "int32") for _ in range(2)
        )
        with T.serial(a.batch_size) as b:
            begin = index_temp(self.indptr[b])
            num_nodes = index_temp(self.indptr[b + 1] - begin)
            fits = T.Or(num_nodes == 0, num_nodes >= a.q_indptr[b + 1] - a.q_indptr[b])
            message = "tree_order must cover all rows of a sequence, or none"
            with T.Assert(fits, message, "ValueError"):
                T.evaluate(0)

            def depths(begin=begin, num_nodes=num_nodes):
                self._fill_depths(begin, num_nodes)

            self._where_depths_matter(a.rope, depths)

    def _where_depths_matter(self, rope, body) -> None:
        if self.has_window:
            body()
        else:
            rope.if_positions_matter(body)

    def _fill_depths(self, begin, num_nodes) -> None:
        """A node's depth is the number of intervals that its number lies in, but its own."""
        count = self.count
        with T.serial(num_nodes + 1) as i:
            T.buffer_store(count, 0, [begin + i])
        with T.serial(num_nodes) as i:
            for side, change in ((0, 1), (1, -1)):
                number = T.min(T.max(self.order[begin + i, side], 0), num_nodes)
                at = index_temp(begin + number)
                T.buffer_store(count, count[at] + change, [at])
        with T.serial(num_nodes) as i:
            T.buffer_store(count, count[begin + i] + count[begin + i + 1], [begin + i + 1])
        with T.serial(num_nodes) as i:
            number = T.min(T.max(self.order[begin + i, 0], 0), num_nodes)
            T.buffer_store(self.depth, count[begin + number] - 1, [begin + i])

    def begin_task(self) -> None:
        """Make the buffers of a task: who sees a column of the tile, and its position."""
        self.low, self.high, self.offset = (T.alloc_buffer((self.tile,), "int32") for _ in range(3))

    def begin_sequence(self, sequence, kv_len) -> None:
        """Go on with another sequence."""
        self.kv_len = kv_len
        self.first_node = index_temp(self.indptr[sequence])
        self.num_nodes = index_temp(self.indptr[sequence + 1] - self.first_node)
        is_tree = self.num_nodes > 0
        self.tree_start = index_temp(T.if_then_else(is_tree, kv_len - self.num_nodes, kv_len))

    def shared_end(self, end):
        """All columns before it are seen by a row with this `end` and by later ones."""
        return T.min(end, self.tree_start)

    def begin_tile(self, first, rope) -> None:
        """Describe the columns from `first` on."""
        is_chain = self.num_nodes == 0
        with T.serial(self.tile) as i:
            column = index_temp(first + i)
            node = index_temp(column - self.tree_start)
            is_node = temp(T.And(node >= 0, column < self.kv_len), 1, "bool")
            at = index_temp(self.first_node + node)
            # A chain has no numbers but those of its columns; no row sees what is not there.
            low = T.if_then_else(is_chain, column, 0)
            low = T.if_then_else(column < self.kv_len, low, _NEVER)
            low = T.if_then_else(is_node, self.order[at, 0], low)
            T.buffer_store(self.low, low, [i])
            T.buffer_store(
                self.high, T.if_then_else(is_node, self.order[at, 1], T.int32(_NEVER)), [i]
            )

            def offset(i=i, is_node=is_node, at=at):
                depth = T.if_then_else(is_node, self.tree_start + self.depth[at] - first, i)
                T.buffer_store(self.offset, depth, [i])

            self._where_depths_matter(rope, offset)

    def offsets(self, start: int, lanes: int):
        """RoPE positions of columns of the tile, relative to its first column's."""
        return load(self.offset, (start,), lanes, "int32")

    def row(self, end):
        """Return what `visible` needs of the row with this `end`: its number."""
        node = T.max(end - 1 - self.tree_start, 0)
        number = T.if_then_else(self.num_nodes > 0, self.order[self.first_node + node, 0], end - 1)
        return index_temp(T.if_then_else(end > 0, number, -1))

    def visible(self, first, start: int, lanes: int, row):
        """Return which of `lanes` columns from ``first + start`` on the `row` sees."""
        number = temp(broadcast(row, lanes), lanes, "int32")
        low = load(self.low, (start,), lanes, "int32") <= number
        return T.And(low, number < load(self.high, (start,), lanes, "int32"))


class TreeWindowMask(TreeMask):
    """A `TreeMask` in which a row sees only the last `window` RoPE positions.

    Those of the rows are `q_rope_position`; columns before the tree are in a row, and those of the
    tree are as far behind them as they are deep.
    """

    has_window = True

    def prepare(self, a) -> None:
        """Also take the positions of the rows."""
        super().prepare(a)
        self.a = a

    def begin_sequence(self, sequence, kv_len) -> None:
        """Also find how far back the rows of the sequence see: they are in no order."""
        super().begin_sequence(sequence, kv_len)
        a = self.a
        self.first_row = index_temp(a.q_indptr[sequence])
        self.num_rows = index_temp(a.q_indptr[sequence + 1] - self.first_row)
        self.k_offset = index_temp(a.k_rope_pos_offset[sequence])
        begins = [Register(1, "int32", self._begin_of(0)) for _ in range(2)]
        with T.serial(self.num_rows) as row:
            begin = index_temp(self._begin_of(row))
            for register, choose in zip(begins, (T.min, T.max), strict=True):
                register.set(choose(register.get(), begin))
        self.min_begin, self.max_begin = (index_temp(T.max(x.get(), 0)) for x in begins)

    def _begin_of(self, row):
        """First column that a row of the sequence sees, as if all columns were in a row.

        Before 0 where the first nodes of the tree are not among the columns.
        """
        return self.a.q_rope_position[self.first_row + row] - self.k_offset + 1 - self.a.window

    def begin(self, row, num_rows, kv_len):
        """No row of the sequence sees a column before it."""
        return self.min_begin

    def shared_begin(self, begin):
        """Between it and `shared_end` every row sees every column."""
        return self.max_begin

    def row(self, end, begin):
        """Return what `visible` needs of the row with this `end`: number and first column."""
        row = T.max(end - 1 - (self.kv_len - self.num_rows), 0)
        return super().row(end), index_temp(self._begin_of(row))

    def visible(self, first, start: int, lanes: int, row):
        """Return which of `lanes` columns from ``first + start`` on the `row` sees."""
        number, begin = row
        positions = load(self.offset, (start,), lanes, "int32") + broadcast(first, lanes)
        is_near = positions >= broadcast(begin, lanes)
        return T.And(super().visible(first, start, lanes, number), is_near)
