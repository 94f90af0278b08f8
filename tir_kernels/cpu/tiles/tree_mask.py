# SPDX-License-Identifier: Apache-2.0
"""Masks of token trees: a node sees the columns before the tree, its ancestors and itself.

The nodes of a sequence's tree are its last columns, in order of appending, parents before their
children. The order of a node is its depth-first number and the end of its subtree, so that node j
is an ancestor of node i, or i itself, where ``order[j, 0] <= order[i, 0] < order[j, 1]``.
"""

from tvm.script import tirx as T
from tvm.script.ir_builder import IRBuilder
from tvm.tirx.buffer import is_buffer_var

from ...script import inline
from ...semantics.rope import has_rope
from ...semantics.visibility import CausalMask, first_in_window
from ...spec import KernelSpec
from ..isa.simd import broadcast, index_temp, load, temp

_NEVER = (1 << 31) - 1


@T.meta_class
class TokenTrees:
    """The trees of a call and the depths of their nodes, which are their positions.

    Parameters
    ----------
    spec : KernelSpec
    a : the kernel's arguments, with a `rope`
    """

    def __init__(self, spec: KernelSpec, a):
        self.spec, self.a, self.indptr, self.order = spec, a, a.tree_order_indptr, a.tree_order
        self.has_window = a.window is not None  # then depths decide about more than RoPE
        num_nodes = self.order.shape[0]
        self.depth = T.alloc_buffer((num_nodes + 1,), "int32")
        self.count = T.alloc_buffer((num_nodes + 1,), "int32")
        IRBuilder.name("tree_depth", self.depth)
        IRBuilder.name("tree_count", self.count)

    @inline
    def begin(self):
        """Check the sizes of the trees, and find the depths of their nodes where they matter."""
        for b in range(self.a.batch_size):
            begin = self.indptr[b]
            num_nodes = self.indptr[b + 1] - begin
            num_rows = T.meta_var(self.a.query_indptr[b + 1] - self.a.query_indptr[b])
            message = T.meta_var("tree_order must cover all rows of a sequence, or none")
            assert num_nodes == 0 or num_nodes >= num_rows, ("ValueError", [message])
            if self.depths_matter():
                self._find_depths(begin, num_nodes)

    def depths_matter(self):
        """Whether anything asks for depths: a window, a bias or a rotation."""
        if self.has_window or self.spec.alibi_slopes:
            return True
        mode = self.a.rotary_mode
        return False if mode is None or not has_rope(self.spec) else mode == 1

    @inline
    def _find_depths(self, begin, num_nodes):
        """A node's depth is the number of intervals that its number lies in, but its own."""
        for i in range(num_nodes + 1):
            self.count[begin + i] = 0
        for i in range(num_nodes):
            opened = begin + T.min(T.max(self.order[begin + i, 0], 0), num_nodes)
            self.count[opened] += 1
            closed = begin + T.min(T.max(self.order[begin + i, 1], 0), num_nodes)
            self.count[closed] -= 1
        for i in range(num_nodes):
            self.count[begin + i + 1] += self.count[begin + i]
        for i in range(num_nodes):
            number = T.meta_var(T.min(T.max(self.order[begin + i, 0], 0), num_nodes))
            self.depth[begin + i] = self.count[begin + number] - 1

    def first_position(self, sequence):
        """Position of column 0 of a ragged sequence whose first row has its own position.

        The kernels over ragged K and V are not told it.
        """
        a = self.a
        num_rows = a.query_indptr[sequence + 1] - a.query_indptr[sequence]
        kv_len = a.kv_indptr[sequence + 1] - a.kv_indptr[sequence]
        num_nodes = self.indptr[sequence + 1] - self.indptr[sequence]
        depth = self.depth[self.indptr[sequence + 1] - num_rows]
        behind_tree = T.if_then_else(num_nodes > 0, num_nodes - depth, num_rows)
        first = a.query_positions[a.query_indptr[sequence]] - (kv_len - behind_tree)
        if self.has_window or self.spec.alibi_slopes:
            return first
        return T.if_then_else(a.rotary_mode == 1, first, 0)


@T.meta_class
class TreeMask(CausalMask):
    """The mask of a task, where every sequence has a tree, or none and is plain causal.

    A node whose interval is empty sees its ancestors, but is seen by nobody. A tile of columns is
    described once, by the interval of depth-first numbers that see each column, and then serves all
    rows. Tiles whose rows see every column skip the mask.

    With a window, a row sees only the last `window` RoPE positions, or its chunk of them. Those of
    the rows are `query_positions`; columns before the tree are in a row, and those of the tree are
    as far behind them as they are deep.

    Parameters
    ----------
    a : the kernel's arguments
    trees : TokenTrees
    tile : int
        Columns of a tile.
    """

    def __init__(self, a, trees: TokenTrees, tile: int):
        super().__init__(T.int32(1))
        self.a, self.trees, self.tile = a, trees, tile
        self.has_window = trees.has_window
        self.low, self.high, self.offset = (T.alloc_buffer((tile,), "int32") for _ in range(3))
        for name in ("kv_len", "first_node", "num_nodes", "tree_start"):
            setattr(self, name, T.local_scalar("int32"))
        if self.has_window:
            for name in ("num_rows", "first_row", "k_offset", "min_begin", "max_begin"):
                setattr(self, name, T.local_scalar("int32"))
        for name, value in vars(self).items():
            if is_buffer_var(value):
                IRBuilder.name(f"mask_{name}", value)

    @inline
    def begin_sequence(self, sequence, kv_len):
        """Load the tree of a sequence."""
        self.kv_len = kv_len
        self.first_node = self.trees.indptr[sequence]
        self.num_nodes = self.trees.indptr[sequence + 1] - self.first_node
        self.tree_start = T.if_then_else(self.num_nodes > 0, kv_len - self.num_nodes, kv_len)
        if self.has_window:  # how far back its rows see: they are in no order
            self.first_row = self.a.query_indptr[sequence]
            self.num_rows = self.a.query_indptr[sequence + 1] - self.first_row
            self.k_offset = self.a.first_positions[sequence]
            self.min_begin = self._own_begin(0)
            self.max_begin = self.min_begin
            for row in range(self.num_rows):
                begin = self._own_begin(row)
                self.min_begin = T.min(self.min_begin, begin)
                self.max_begin = T.max(self.max_begin, begin)
            self.min_begin = T.max(self.min_begin, 0)
            self.max_begin = T.max(self.max_begin, 0)

    def _own_begin(self, row):
        """First column that a row of the sequence sees, as if all columns were in a row.

        Before 0 where the first nodes of the tree are not among the columns.
        """
        position = self.a.query_positions[self.first_row + row]
        return first_in_window(self.a.window, position) - self.k_offset

    def begin(self, row, num_rows, kv_len):
        """No row of the sequence sees a column before it."""
        return self.min_begin

    def shared_begin(self, begin):
        """Between it and `shared_end` every row sees every column."""
        return self.max_begin

    def shared_end(self, end):
        """All columns before it are seen by a row with this `end` and by later ones."""
        return T.min(end, self.tree_start)

    @inline
    def begin_tile(self, first, rope):
        """Describe the columns from `first` on."""
        for i in range(self.tile):
            column = first + i
            node = column - self.tree_start
            is_node = node >= 0 and column < self.kv_len
            at = self.first_node + node
            # A chain has no numbers but those of its columns; no row sees what is not there.
            low = T.if_then_else(self.num_nodes == 0, column, 0)
            low = T.if_then_else(column < self.kv_len, low, _NEVER)
            self.low[i] = T.if_then_else(is_node, self.trees.order[at, 0], low)
            self.high[i] = T.if_then_else(is_node, self.trees.order[at, 1], T.int32(_NEVER))
            if self.trees.depths_matter():
                depth = T.meta_var(self.tree_start + self.trees.depth[at] - first)
                self.offset[i] = T.if_then_else(is_node, depth, i)

    def offsets(self, start: int, lanes: int):
        """RoPE positions of columns of the tile, relative to its first column's."""
        return load(self.offset, (start,), lanes, "int32")

    def row(self, end, begin=None):
        """Return what `visible` needs of the row with this `end`: its number, and first column."""
        node = T.max(end - 1 - self.tree_start, 0)
        number = self.trees.order[self.first_node + node, 0]
        number = T.if_then_else(self.num_nodes > 0, number, end - 1)
        number = index_temp(T.if_then_else(end > 0, number, -1))
        if not self.has_window:
            return number, None
        row = T.max(end - 1 - (self.kv_len - self.num_rows), 0)
        return number, index_temp(self._own_begin(row))

    def visible(self, first, start: int, lanes: int, row):
        """Return which of `lanes` columns from ``first + start`` on the `row` sees."""
        number, begin = row
        number = temp(broadcast(number, lanes), lanes, "int32")
        seen = load(self.low, (start,), lanes, "int32") <= number
        seen = T.And(seen, number < load(self.high, (start,), lanes, "int32"))
        if begin is None:
            return seen
        positions = self.offsets(start, lanes) + broadcast(first, lanes)
        return T.And(seen, positions >= broadcast(begin, lanes))
