# SPDX-License-Identifier: Apache-2.0
"""Rows of a tile that lie along the lanes of vectors: Q, what they see, and blocks of them.

``S^T = K Q^T``: scalars of the products are elements of K, and those of the second product elements
of V, so neither is transposed. Maxima and sums of rows need no shuffles. Q and O are transposed
instead, once for all positions.
"""

from typing import NamedTuple

from tvm.script import tirx as T

from ...script import inline
from ...spec import KernelSpec
from ..isa.matrices.register_tile import RegisterTile, round_up
from ..isa.shuffles import transpose
from ..isa.simd import broadcast, for_chunks, load, store
from ..softmax.logits import AlibiBias, soft_cap
from .lane_kv import rounded
from .tree_mask import TreeMask


class RowBlock(NamedTuple):
    """Vectors of rows that go through the registers together.

    Parameters
    ----------
    index, count : int32 expressions
        Which block it is, and how many there are.
    vector : int32 expression
        Its first vector of rows.
    tile : RegisterTile
    """

    index: object
    count: object
    vector: object
    tile: RegisterTile

    @property
    def first_row(self):
        """Its first row."""
        return self.vector * self.tile.lanes

    @property
    def end_row(self):
        """The row behind its last one, which may not exist."""
        return self.first_row + self.tile.width


class LaneView(NamedTuple):
    """What a block of rows sees of a tile of K and V.

    Parameters
    ----------
    block : RowBlock
    first : int32 expression
        First position of the tile.
    num_seen : int32 expression
        Positions of the tile, from the first one on, that some row sees.
    k_offset : int32 expression
        RoPE position of position 0.
    """

    block: RowBlock
    first: object
    num_seen: object
    k_offset: object = 0

    @property
    def num_positions(self):
        """Positions that the softmax takes: those that are seen, in whole steps."""
        return rounded(self.num_seen)


@T.meta_class
class RowBlocks:
    """The vectors of rows of a tile, in blocks that go through the registers together.

    Rows that fill no whole register tile take blocks of a single vector.
    """

    def __init__(self, spec: KernelSpec, ops):
        has_many = spec.target.registers >= 32
        wide, narrow = 8 if has_many else 4, 16 if has_many and spec.v_head_dim % 16 == 0 else 8
        make = ops.product_tile or RegisterTile
        if ops.product_tile:
            wide = narrow = make.shape(spec.target)[0]
        self.wide_tile = make(ops, wide, vectors_of(spec), ops.lanes)
        self.narrow_tile = make(ops, narrow, 1, ops.lanes)
        self.num_vectors, self.num_wide, self.count = (T.local_scalar("int32") for _ in range(3))

    @inline
    def begin(self, num_rows):
        """Divide a tile of rows into wide and narrow blocks."""
        self.num_vectors = (num_rows + self.wide_tile.lanes - 1) // self.wide_tile.lanes
        self.num_wide = self.num_vectors // self.wide_tile.vectors
        self.count = self.num_vectors - self.num_wide * (self.wide_tile.vectors - 1)

    def wide(self, index) -> RowBlock:
        """Block `index`, one of the first `num_wide`."""
        return RowBlock(index, self.count, index * self.wide_tile.vectors, self.wide_tile)

    def narrow(self, index) -> RowBlock:
        """Block `index`, one of the others."""
        vector = index + self.num_wide * (self.wide_tile.vectors - 1)
        return RowBlock(index, self.count, vector, self.narrow_tile)


def vectors_of(spec: KernelSpec) -> int:
    """Vectors of a wide block."""
    return 2 if spec.target.registers >= 32 else 3


@inline
def transpose_block(source, sink, rows, columns, dtype):
    """Transpose a ``[rows, columns]`` block, in squares of as many lanes as fit.

    Parameters
    ----------
    source : ``(row, column, lanes) -> vector``
    sink : ``(column, row, lanes, value)``
    rows, columns : int
        Multiples of a common power of two; the squares are of 16 at most.
    """
    size = T.meta_var(min(16, rows & -rows, columns & -columns))
    for i in range(rows // size):
        for j in range(columns // size):
            _transpose_square(source, sink, i * size, j * size, size, dtype)


def _transpose_square(source, sink, row, column, size: int, dtype: str) -> None:
    square = transpose([source(row + r, column, size) for r in range(size)], dtype)
    for c, value in enumerate(square):
        sink(column + c, row, size, value)


@T.meta_class
class LaneQueries:
    """Rows of Q as ``[vector, element, lane]``.

    Parameters
    ----------
    spec : KernelSpec
    ops : operands object
    max_rows : int
    a : the kernel's arguments.
    rope : the rotation inside the kernel.
    factor : float32 expression
        Scale of the logits times log2(e).
    """

    def __init__(self, spec: KernelSpec, ops, max_rows: int, a, rope, factor):
        self.spec, self.ops, self.lanes = spec, ops, ops.lanes
        self.a, self.rope, self.factor = a, rope, factor
        self.depth = spec.qk_head_dim // ops.values_per_element
        vectors = -(-max_rows // self.lanes)
        padded = round_up(self.depth, (ops.product_tile or RegisterTile).step)
        self.vectors = T.alloc_buffer((vectors, padded, self.lanes), ops.dtype)
        self.rows = T.alloc_buffer((self.lanes, self.depth), ops.dtype)
        self.bias = AlibiBias.of(spec, vectors * self.lanes)

    @inline
    def begin_task(self):
        """Let the elements behind those of Q be zeros."""
        num_vectors, padded, _ = T.meta_var(self.vectors.shape)
        if int(padded) > self.depth:
            zeros = T.meta_var(broadcast(T.cast(0, self.ops.dtype), self.lanes))
            for vector in range(num_vectors):
                for i in range(padded - self.depth):
                    at = T.meta_var((vector, self.depth + i, 0))
                    store(self.vectors, at, self.lanes, zeros, self.ops.dtype)

    @inline
    def load(self, vector, tile):
        """Take a vector of the rows of a tile; the last one repeats the last row."""
        for i in range(self.lanes):
            row = vector * self.lanes + i
            token = tile.token(T.min(row, tile.num_rows - 1))
            head = tile.query_head(T.min(row, tile.num_rows - 1))

            if self.rope.rotates_q:
                self.rope.set_position(self.a.q_position(token))
                self.rope.rotate(lambda c, n: load(self.a.q, (token, head, c), n))
                for_chunks(self.depth, self.lanes, lambda c, n: self._put_rotated(i, c, n))
            else:
                for_chunks(self.depth, self.lanes, lambda c, n: self._put(i, token, head, c, n))
            if self.bias is not None:
                self.bias.set_row(row, head, self.a.query_positions[token])
        transpose_block(
            lambda row, element, n: load(self.rows, (row, element), n, self.ops.dtype),
            lambda element, row, n, value: store(
                self.vectors, (vector, element, row), n, value, self.ops.dtype
            ),
            self.lanes,
            self.depth,
            self.ops.dtype,
        )

    def _put(self, row, token, head, start: int, lanes: int) -> None:
        elements = self.ops.load_q(self.a.q, (token, head, start), lanes, self.factor)
        store(self.rows, (row, start), lanes, elements, self.ops.dtype)

    def _put_rotated(self, row, start: int, lanes: int) -> None:
        elements = self.ops.load_rotated_q(self.rope.row, start, lanes, self.factor)
        store(self.rows, (row, start), lanes, elements, self.ops.dtype)

    def at(self, element, row) -> tuple:
        """Return buffer and index of a vector of rows from `row` on."""
        return self.vectors, (row // self.lanes, element, 0)

    def logit(self, value, row, position):
        """Return the logits of a vector of rows from `row` on, times log2(e), at a position."""
        if not self.ops.scale_in_q:
            value = value * broadcast(self.factor, self.lanes)
        value = soft_cap(value, self.spec.logit_softcap, self.lanes)
        return value + self.bias.of_rows(row, self.lanes, position) if self.bias else value


@T.meta_class
class LaneMask:
    """Which positions the rows of a tile see: by a number of each row, and with a window by two.

    Parameters
    ----------
    mask : CausalMask or TreeMask
        A tree describes positions by intervals of depth-first numbers.
    """

    def __init__(self, mask, max_rows: int, lanes: int):
        self.mask, self.lanes = mask, lanes
        self.is_tree = isinstance(mask, TreeMask)
        num_rows = -(-max_rows // lanes) * lanes
        self.numbers = T.alloc_buffer((num_rows,), "int32")
        self.begins = T.alloc_buffer((num_rows,), "int32") if mask.has_window else None
        self.own = None if mask.sees is None else T.alloc_buffer((num_rows,), "int32")

    @inline
    def load(self, vector, tile):
        """Take the numbers of a vector of the rows of a tile."""
        for i in range(self.lanes):
            row = T.meta_var(T.min(vector * self.lanes + i, tile.num_rows - 1))
            end = tile.end_of(row)
            number, begin = T.meta_var(
                self.mask.row(end)
                if self.is_tree
                else (end - 1, tile.begin_of(row) if self.mask.has_window else None)
            )
            self.numbers[vector * self.lanes + i] = number
            if self.begins is not None:
                self.begins[vector * self.lanes + i] = begin
            if self.own is not None:
                self.own[vector * self.lanes + i] = tile.own(row)

    def visible(self, first, position, row):
        """Whether the rows of a vector, from `row` on, see a position of the tile at `first`."""
        number = load(self.numbers, (row,), self.lanes, "int32")
        column = first + position
        if self.is_tree:
            low, high = (
                broadcast(x[position], self.lanes) for x in (self.mask.low, self.mask.high)
            )
            seen = T.And(low <= number, number < high)
            if self.begins is not None:  # windows count nodes by their depths
                column = first + self.mask.offset[position]
        else:
            seen = broadcast(column, self.lanes) <= number
        if self.begins is not None:
            begins = load(self.begins, (row,), self.lanes, "int32")
            seen = T.And(seen, broadcast(column, self.lanes) >= begins)
        if self.own is not None:
            own = load(self.own, (row,), self.lanes, "int32")
            seen = T.And(seen, self.mask.sees(own, broadcast(column, self.lanes), self.lanes))
        return seen

    def last_begin(self, tile, row):
        """Return the position from which on every row up to `row` of a tile sees, with a window."""
        return self.mask.shared_begin(0 if self.is_tree else tile.begin_of(row))
