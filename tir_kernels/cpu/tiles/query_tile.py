# SPDX-License-Identifier: Apache-2.0
"""Rows of Q, packed for register tiles."""

from collections.abc import Callable
from dataclasses import dataclass

from tvm.script import tirx as T

from ...script import inline
from ...spec import LOG2E, KernelSpec
from ..isa.matrices.register_tile import ColumnTiles, RegisterTile, round_up
from ..isa.simd import elements_per_line, load, prefetch, store_row
from .kv_tile import POSITIONS
from .row_bounds import TileView

BLOCKS = 4  # that use a panel of K or V while it is in L1


def tile_tokens(spec: KernelSpec) -> int:
    """Return the tokens of a tile, whose Q and O take at most half a megabyte."""
    num_rows = max(32, min(512, 131072 // (spec.qk_head_dim + spec.v_head_dim)))
    return max(1, min(256, num_rows // spec.group_size))


@dataclass(frozen=True)
class Tiling:
    """Cache and register blocking of the rows of a tile.

    Parameters
    ----------
    tokens : int
        Tokens of a tile; times the group size, its rows.
    rows : int
        Rows of a block, which is a register tile high.
    num_blocks : int
        Blocks of a full tile.
    """

    tokens: int
    rows: int
    num_blocks: int

    @staticmethod
    def of(spec: KernelSpec, ops) -> "Tiling":
        """Choose the rows of a block by what multiplies them."""
        tokens = tile_tokens(spec)
        rows, _ = (ops.product_tile or RegisterTile).shape(spec.target)
        return Tiling(tokens, rows, -(-tokens * spec.group_size // rows))


@T.meta_class
class QueryTile:
    """Some tokens with the query heads of one KV head: a row each, in blocks of `block_rows`.

    A task begins one tile after another. A block is packed when it first sees some column of a
    span.

    Parameters
    ----------
    spec : KernelSpec
    ops : operands object
    a : the kernel's arguments, with a `rope`
    tiles : ColumnTiles
        For the columns of V, with rows of a block.
    bias : AlibiBias, optional

    Attributes
    ----------
    q : Buffer ``[row, element]``
    token, query_head : int32 variables
        Of the row that `locate` was last called for.
    """

    def __init__(self, spec: KernelSpec, ops, a, tiles: ColumnTiles, bias=None):
        self.spec, self.ops, self.a, self.tiles, self.bias = spec, ops, a, tiles, bias
        self.group, self.lanes = spec.group_size, spec.target.lanes
        tiling = Tiling.of(spec, ops)
        self.max_blocks, self.block_rows = tiling.num_blocks, tiling.rows
        num_rows = tiling.num_blocks * tiling.rows
        self.depth = spec.qk_head_dim // ops.values_per_element
        self.padded_depth = round_up(self.depth, tiles.step)  # behind the elements there are zeros
        self.q = T.alloc_buffer((num_rows, self.padded_depth), ops.dtype)
        self.factor = T.local_scalar("float32")  # of the logits, times log2(e)
        self.first_token = T.local_scalar("int32")
        self.head = T.local_scalar("int32")
        self.num_rows = T.local_scalar("int32")
        self.num_blocks = T.local_scalar("int32")
        self.num_packed = T.local_scalar("int32")  # blocks
        self.token = T.local_scalar("int32")
        self.query_head = T.local_scalar("int32")

    @inline
    def begin_task(self):
        """Take the scale of the logits, and clear what is behind the elements of Q."""
        self.factor = self.a.sm_scale * T.float32(LOG2E)
        if self.padded_depth > self.depth:
            for row in range(self.q.shape[0]):
                for i in range(self.padded_depth - self.depth):
                    self.q[row, self.depth + i] = T.cast(0, self.ops.dtype)

    @inline
    def begin(self, first_token, num_tokens, head):
        """Start other rows."""
        self.first_token = first_token
        self.head = head
        self.num_rows = num_tokens * self.group
        self.num_blocks = (self.num_rows + self.block_rows - 1) // self.block_rows

    @property
    def last_row(self):
        """Last row of the last block."""
        return self.num_blocks * self.block_rows - 1

    @inline
    def begin_span(self):
        """Start other columns, for which rows may have other positions."""
        self.num_packed = 0

    @inline
    def locate(self, row):
        """Find the token and the query head of a row; rows past the end repeat the last one."""
        source = self._source(row)
        self.token = self.first_token + source // self.group
        self.query_head = self.head * self.group + source % self.group

    def head_of(self, row):
        """Return the query head of a row."""
        return self.head * self.group + self._source(row) % self.group

    def _source(self, row):
        return T.min(row, self.num_rows - 1)

    @inline
    def load(self, view: TileView, last_position=None):
        """Pack rows of Q if none of the span's columns were seen; `last_position` bounds theirs."""
        if view.block >= self.num_packed:
            self.num_packed = view.block + view.count
            for i in range(view.num_rows):
                row = view.first_row + i
                self.locate(row)
                self._load_row(row, last_position)

    @inline
    def _load_row(self, row, last_position):
        """Pack a row that was located."""
        a, ops, factor, rope = T.meta_var((self.a, self.ops, self.factor, self.a.rope))
        at = T.meta_var(lambda i: (self.token, self.query_head, i))
        position = a.q_position(self.token)
        if last_position is not None:
            position = T.min(position, last_position)
        if rope.rotates_q:
            rope.begin_row(self.token, position)
            rope.rotate(lambda i, n: load(a.q, at(i), n))
            self._put_q(row, lambda i, n: ops.load_rotated_q(rope.row, i, n, factor))
        else:
            self._put_q(row, lambda i, n: ops.load_q(a.q, at(i), n, factor))
        if self.bias is not None:
            self.bias.set_row(row, self.query_head, position)

    def _put_q(self, row, elements: Callable) -> None:
        store_row(self.q, (row,), self.depth, self.lanes, elements, self.ops.dtype)

    @inline
    def prefetch(self, view: TileView, product):
        """Prefetch some of the rows of Q that are packed next, with one of the products."""
        count = T.meta_var(self.block_rows * self.tiles.wide.width // POSITIONS)
        end = T.meta_var(view.block + view.count)
        if end == self.num_packed and end < self.num_blocks:
            for i in range(count):
                self.locate(end * self.block_rows + product * count + i)
                self._prefetch_row()

    def _prefetch_row(self) -> None:
        q = self.a.q
        for column in range(0, int(q.shape[-1]), elements_per_line(str(q.dtype))):
            prefetch(q, (self.token, self.query_head, column))
