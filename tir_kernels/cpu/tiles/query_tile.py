# SPDX-License-Identifier: Apache-2.0
"""Rows of Q, packed, and their results: O and the state of the softmax."""

from collections.abc import Callable
from dataclasses import dataclass

from tvm.script import tirx as T

from ...script import inline
from ...spec import LOG2E, KernelSpec
from ..isa.matrices.register_tile import ColumnTiles, RegisterTile, round_up
from ..isa.simd import F32, broadcast, constant, elements_per_line, load, prefetch, store, store_row
from ..softmax.output import Output
from .packed_kv import POSITIONS, PackedKv
from .row_bounds import TilePart

BLOCKS = 4  # that use a part of K or V while it is in L1
UNSEEN, BEGUN, STORED = range(3)  # progress of a block


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
    span, and stored with the last tile of K and V that it sees, while its sums are in registers::

        rows.begin(first_token, num_tokens, head)
        for every span of columns:
            rows.begin_span()
            for every tile of K and V, and every part of the rows that sees some of it:
                rows.pack(part)
                ...  # scores and weights
                rows.finish(part)
                rows.add(scores, kv, part)
        rows.end()

    Parameters
    ----------
    spec : KernelSpec
    ops : operands object
    a : the kernel's arguments, with a `rope`
    tiles : ColumnTiles
        For the columns of V, with rows of a block.
    softmax : OnlineSoftmax
    bias : AlibiBias, optional

    Attributes
    ----------
    q, o : Buffers ``[row, element]`` and float32 ``[row, column]``
    token, query_head : int32 variables
        Of the row that `locate` was last called for.
    """

    def __init__(self, spec: KernelSpec, ops, a, tiles: ColumnTiles, softmax, bias=None):
        self.spec, self.ops, self.a, self.tiles = spec, ops, a, tiles
        self.softmax, self.bias = softmax, bias
        self.output = Output(spec, a)
        # Rows that are rotated back first are stored at the end.
        self.stores_early = not a.rope.restores
        self.group, self.lanes = spec.group_size, spec.target.lanes
        tiling = Tiling.of(spec, ops)
        self.block_rows = tiling.rows
        num_rows, self.depth = (
            tiling.num_blocks * tiling.rows,
            spec.qk_head_dim // ops.values_per_element,
        )
        self.padded_depth = round_up(self.depth, tiles.step)  # behind the elements there are zeros
        self.q = T.alloc_buffer((num_rows, self.padded_depth), ops.dtype)
        self.o = T.alloc_buffer((num_rows, round_up(spec.v_head_dim, tiles.column_step)), F32)
        self.inverse = T.alloc_buffer((BLOCKS * tiling.rows,), F32)
        self.progress = T.alloc_buffer((tiling.num_blocks,), "int32")
        self.factor = T.local_scalar("float32")  # of the logits, times log2(e)
        self.first_token = T.local_scalar("int32")
        self.head = T.local_scalar("int32")
        self.num_rows = T.local_scalar("int32")
        self.num_blocks = T.local_scalar("int32")
        self.num_packed = T.local_scalar("int32")  # blocks
        self.is_new = T.local_scalar("int32")  # whether a part has no sums yet
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
        """Start other rows, whose softmax has seen nothing yet."""
        self.first_token = first_token
        self.head = head
        self.num_rows = num_tokens * self.group
        self.num_blocks = (self.num_rows + self.block_rows - 1) // self.block_rows
        for block in range(self.num_blocks):
            self.softmax.reset(block)
            self.progress[block] = T.int32(UNSEEN)

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

    def _source(self, row):
        return T.min(row, self.num_rows - 1)

    @inline
    def pack(self, part: TilePart, last_position=None):
        """Pack rows of Q if none of the span's columns were seen; `last_position` bounds theirs."""
        self.is_new = T.if_then_else(self.progress[part.block] == UNSEEN, 1, 0)
        if self.is_new == 1:
            for j in range(part.count):
                self.progress[part.block + j] = T.int32(BEGUN)
        if part.block >= self.num_packed:
            self.num_packed = part.block + part.count
            for i in range(part.num_rows):
                row = part.first_row + i
                self.locate(row)
                self._pack_row(row, last_position)

    @inline
    def _pack_row(self, row, last_position):
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
    def prefetch(self, part: TilePart, product):
        """Prefetch some of the rows of Q that are packed next, with one of the products."""
        count = T.meta_var(self.block_rows * self.tiles.wide.width // POSITIONS)
        end = T.meta_var(part.block + part.count)
        if end == self.num_packed and end < self.num_blocks:
            for i in range(count):
                self.locate(end * self.block_rows + product * count + i)
                self._prefetch_row()

    def _prefetch_row(self) -> None:
        q = self.a.q
        for column in range(0, int(q.shape[-1]), elements_per_line(str(q.dtype))):
            prefetch(q, (self.token, self.query_head, column))

    @inline
    def finish(self, part: TilePart):
        """Store LSE of the blocks that see no column behind the tile; `add` will store their O."""
        if self.stores_early:
            for j in range(part.count):
                if part.completes(j):
                    self.progress[part.block + j] = T.int32(STORED)
                    for i in range(self.block_rows):
                        row = j * self.block_rows + i
                        total = self.softmax.row_sum[self.softmax.index(part.block + j, i)]
                        self._normalize(row, part.first_row + row, total)

    @inline
    def _normalize(self, row, tile_row, total):
        """Store LSE of a row of the tile, and keep the factor of its sums."""
        head = T.meta_var(self.head * self.group + self._source(tile_row) % self.group)
        top = T.meta_var(self.softmax.row_max[self.state(tile_row)])
        factor, log = T.meta_var(self.output.normalizer(head, top, total))
        self.inverse[row] = factor
        self.locate(tile_row)
        self.output.put_lse(self.token, self.query_head, log)

    def state(self, row):
        """Index of a row in the arrays of the softmax."""
        return self.softmax.index(row // self.block_rows, row % self.block_rows)

    @inline
    def add(self, scores, kv: PackedKv, part: TilePart):
        """``O = O * rescale + P V``."""
        self.tiles.each(lambda tile, column: self._add(tile, column, scores, kv, part))

    @inline
    def _add(self, tile, column, scores, kv, part):
        """Add some columns."""
        for j in range(part.count):
            row = j * self.block_rows
            first_row = part.first_row + row
            step = T.meta_var(tile.step * self.ops.values_per_element)
            depth = (part.num_seen(j) + step - 1) // step * tile.step
            if self.is_new == 1:
                tile.clear()
            else:
                state = T.meta_var(self.softmax.index(part.block + j, 0))
                tile.load_scaled(self.o, first_row, column, self.softmax.rescale, state)
            tile.multiply(scores.weights, row, kv.v, column, depth)
            if self.stores_early and part.completes(j):
                tile.take_sums()
                for i in T.unroll(self.block_rows):
                    self.locate(first_row + i)
                    for k in T.unroll(tile.vectors):
                        at = T.meta_var((self.token, self.query_head, column + k * tile.lanes))
                        inverse = T.meta_var(broadcast(self.inverse[row + i], tile.lanes))
                        store(self.a.o, at, tile.lanes, tile.sums[tile.at(i, k)] * inverse)
            else:
                tile.put(self.o, first_row, column)

    @inline
    def add_visible(self, scores, kv: PackedKv, part: TilePart):
        """Do what `add` does where V is not finite: row by row, over what each of them sees."""
        for i in range(part.num_rows):
            if self.is_new == 1:
                self._clear_row(part.first_row + i)
            self._add_row(i, scores, kv, part)
            if self.stores_early and part.completes(i // self.block_rows):
                self._store_row(part.first_row + i)

    @inline
    def _add_row(self, i, scores, kv, part):
        visible = T.meta_var(part.visible_to(i))
        row = T.meta_var(part.first_row + i)
        self.tiles.in_registers.each(
            lambda tile, column: self._add_visible(tile, column, row, i, scores, kv, visible)
        )

    @inline
    def _add_visible(self, tile, column, row, weights_row, scores, kv, visible):
        """Add some columns of a row."""
        rescale = self.softmax.rescale[self.state(row)]
        for j in T.unroll(tile.vectors):
            o = T.meta_var(load(self.o, (row, column + j * tile.lanes), tile.lanes))
            tile.sums[tile.at(0, j)] = o * broadcast(rescale, tile.lanes)
        for k in range(POSITIONS // self.ops.values_per_element):
            weight = scores.weights[weights_row, k]
            for j in T.unroll(tile.vectors):
                at = T.meta_var(kv.v.at(k, column + j * tile.lanes))
                value = T.meta_var(load(*at, tile.lanes, self.ops.dtype))
                first = T.meta_var(k * self.ops.values_per_element)
                is_seen = T.meta_var(
                    [visible(first + n, 1) for n in range(self.ops.values_per_element)]
                )
                seen = self.ops.select(value, is_seen, tile.lanes)
                sums = T.meta_var(tile.sums[tile.at(0, j)])
                factor = T.meta_var(broadcast(weight, tile.lanes))
                tile.sums[tile.at(0, j)] = self.ops.fma(sums, factor, seen, tile.lanes)
        for j in T.unroll(tile.vectors):
            at = T.meta_var((row, column + j * tile.lanes))
            store(self.o, at, tile.lanes, tile.sums[tile.at(0, j)])

    @inline
    def end(self):
        """Store rows that are not stored: those that see nothing, or are rotated back first."""
        for block in range(self.num_blocks):
            if self.progress[block] != STORED:
                for i in range(self.block_rows):
                    row = block * self.block_rows + i
                    if self.progress[block] == UNSEEN:
                        self._clear_row(row)
                    self.a.rope.restore(self.o, row)
                    self._store_row(row)

    @inline
    def _store_row(self, row):
        self.locate(row)
        state = T.meta_var(self.state(row))
        top, total = T.meta_var((self.softmax.row_max[state], self.softmax.row_sum[state]))
        self.output.finish(self.token, self.query_head, self.o, row, top, total)

    def _clear_row(self, row) -> None:
        width, lanes = self.spec.v_head_dim, self.lanes
        store_row(self.o, (row,), width, lanes, lambda i, n: constant(0.0, n))
