# SPDX-License-Identifier: Apache-2.0
"""Products of single query rows with K and V, read as they lie in the pages.

Elements are float32 numbers or pairs of bfloat16. Pairs of V are pairs of positions, made of the
words of two rows where these are: of each chunk the even columns come first, then the odd ones.
Sums are kept in that order, and put into that of the columns once at the end.
"""

from tvm.script import tirx as T

from ...script import inline
from ...spec import KernelSpec
from ..isa.shuffles import next_power_of_two, reduce_each, widen
from ..isa.simd import (
    F32,
    add,
    broadcast,
    chunks,
    constant,
    elements_per_line,
    index_temp,
    load,
    shuffle,
    store,
    store_row,
    temp,
)
from .kv_blocks import BLOCK, STRIP, KvBlocks
from .query_rows import QueryRows

SOON = 8  # positions between a line's last prefetch and its use


@T.meta_class
class RowProducts:
    """Multiplies the rows of a local head with a block of K, and their weights with one of V.

    Parameters
    ----------
    spec : KernelSpec
    ops : operands object
    rows : QueryRows
    """

    def __init__(self, spec: KernelSpec, ops, rows: QueryRows):
        self.spec, self.ops, self.rows, self.rope = spec, ops, rows, rows.rope
        self.lanes, self.blocking = spec.target.lanes, rows.blocking
        shape = (self.blocking.positions, rows.elements)
        self.rotated = T.alloc_buffer(shape, ops.dtype)  # rows of K
        if rows.rope.rotates_k is not False:
            self.angles = rows.rope.angles_of(BLOCK)  # of the block, for all local heads

    @inline
    def begin_head(self, local_head):
        """Rows of Q are multiplied as `QueryRows` keeps them."""

    @inline
    def begin_block(self, kv: KvBlocks, k_offset):
        """Start a block of positions, of which each local head has its K and V."""
        count, rope = T.meta_var((self.blocking.positions, self.rope))
        if rope.rotates_k:
            for t in range((kv.count + count - 1) // count * count):
                rope.set_position(k_offset + kv.first + t, self.angles, t)

    @inline
    def multiply_q_k(self, kv: KvBlocks):
        """``S = Q K^T`` for a block of positions; lines that come next are prefetched."""
        count, ops, rope, rotated = T.meta_var(
            (self.blocking.positions, self.ops, self.rope, self.rotated)
        )
        for i in range((kv.count + count - 1) // count):
            position = kv.first + i * count
            tile = kv.rows.tile(position, count)
            soon = kv.rows.tile(position + SOON, count)
            following = kv.following.tile(kv.following_first + i * count, count)

            @inline
            def prefetch(t, column):
                following.prefetch_k(t, column)
                tile.prefetch_v(t, column)
                soon.prefetch_k(t, column)

            if rope.rotates_k:
                for t in range(count):
                    row = kv.rows.tile(position + t, 1)
                    rope.rotate(lambda c, n: row.load_k(0, c, n), self.angles, i * count + t)
                    packed = T.meta_var(lambda c, n: ops.pack(rope.row, c, n))
                    store_row(rotated, (t,), self.rows.elements, self.lanes, packed, ops.dtype)
                for block in range(self.blocking.row_blocks):
                    k = T.meta_var(lambda t, c, n: load(rotated, (t, c), n, ops.dtype))
                    self._score(kv.local_head, block, i * count, k, prefetch)
            else:
                for block in range(self.blocking.row_blocks):
                    k = T.meta_var(lambda t, c, n: ops.load_k(tile, t, c, n))
                    self._score(kv.local_head, block, i * count, k, prefetch)

    @inline
    def _score(self, local_head, block, column, k, prefetch):
        """Multiply a set of rows with a few rows of K, whose elements are ``k(row, column, n)``."""
        num_rows, count, lanes = T.meta_var(
            (self.blocking.rows, self.blocking.positions, self.lanes)
        )
        first_row = (local_head * self.blocking.row_blocks + block) * num_rows
        total = T.alloc_local((num_rows, count * lanes), F32)
        for r in T.unroll(num_rows):
            for t in T.unroll(count):
                store(total, (r, t * lanes), lanes, constant(0.0, lanes))
        line = T.meta_var(elements_per_line(self.spec.k_dtype) // self.ops.numbers)

        @inline
        def multiply(start, width):
            for t in T.unroll(count):
                prefetch(t, start * self.ops.numbers)
            for v in T.unroll(width // lanes):
                self._multiply_vector(total, first_row, start + v * lanes, lanes, k)
            if width % lanes > 0:
                rest = T.meta_var(width % lanes)
                self._multiply_vector(total, first_row, start + width - rest, rest, k)

        width = T.meta_var(self.rows.elements)
        for i in range(width // line):
            multiply(i * line, line)
        if width % line > 0:
            multiply(width - width % line, width % line)
        self._store_scores(total, block * num_rows, column, count)

    @inline
    def _multiply_vector(self, total, first_row, column, n, k):
        """Add the products of `n` elements from `column` on."""
        dtype, ops, lanes = T.meta_var((self.ops.dtype, self.ops, self.lanes))
        q = T.alloc_local((self.blocking.rows, n), dtype)
        for r in T.unroll(self.blocking.rows):
            value = T.meta_var(load(self.rows.q, (first_row + r, column), n, dtype))
            store(q, (r, 0), n, value, dtype)
        for t in T.unroll(self.blocking.positions):
            row = k(t, column, n)
            for r in T.unroll(self.blocking.rows):
                at, factor = T.meta_var(((r, t * lanes), load(q, (r, 0), n, dtype)))
                if n == lanes:
                    store(total, at, lanes, ops.fma(load(total, at, lanes), factor, row, n))
                else:
                    narrow = ops.fma(constant(0.0, n), factor, row, n)
                    store(total, at, lanes, load(total, at, lanes) + widen(narrow, n))

    def _store_scores(self, total, first_row, column, count: int) -> None:
        """Add up the lanes of the sums, and store them as columns of the scores."""
        rows, lanes = range(self.blocking.rows), self.lanes
        at_once = max(1, lanes // count)
        for first in range(0, len(rows), at_once):
            batch = rows[first : first + at_once]
            vectors = [load(total, (r, t * lanes), lanes) for r in batch for t in range(count)]
            sums = reduce_each(vectors, lanes, add)
            if not self.ops.scale_in_q:
                width = next_power_of_two(len(vectors))
                sums = temp(sums * broadcast(self.rows.factor, width), width)
            for i, r in enumerate(batch):
                own = range(i * count, (i + 1) * count)
                value = shuffle([sums], own) if len(vectors) > 1 else sums
                store(self.rows.scores, (first_row + r, column), count, value)

    @inline
    def take_v(self, kv: KvBlocks):
        """V is read where it lies."""

    @inline
    def add_weighted_v(self, kv: KvBlocks, block):
        """``O = O * rescale + P V`` for a set of rows; positions that are not visible are not read.

        All columns of a few rows of V come before the next rows, so that memory is read in order.
        """
        num_rows, o = T.meta_var((self.blocking.rows, self.rows.o))
        first_row = (kv.local_head * self.blocking.row_blocks + block) * num_rows
        for i in range(num_rows):
            row, width = T.meta_var((first_row + i, self.spec.v_head_dim))
            rescale = self.rows.softmax.rescale[self.rows.state(row)]
            decayed = T.meta_var(lambda c, n: load(o, (row, c), n) * broadcast(rescale, n))
            store_row(o, (row,), width, self.lanes, decayed)
        elements = T.meta_var(self.spec.v_head_dim // self.ops.numbers)
        width = T.meta_var(max(1, self.blocking.vectors // self.ops.numbers) * self.lanes)
        # Strips of a line, the first of which prefetches.
        line = T.meta_var(elements_per_line(self.spec.v_dtype) // self.ops.numbers)
        strips = T.meta_var(max(1, line // width))
        for i in range((kv.count + STRIP - 1) // STRIP):
            first = T.meta_var(i * STRIP)
            count = T.min(STRIP, kv.count - first)
            row = T.meta_var(block * num_rows)
            for j in range(elements // width // strips):
                start = T.meta_var(j * (strips * width))
                self._add_strip(kv, first_row, row, start, width, first, count)
                if strips > 1:
                    for k in range(strips - 1):
                        next_start = T.meta_var(start + (k + 1) * width)
                        self._add_strip(kv, first_row, row, next_start, width, first, count, False)
            if strips > 1:
                for j in range(elements // width % strips):
                    start = T.meta_var((elements // width // strips * strips + j) * width)
                    self._add_strip(kv, first_row, row, start, width, first, count)
            if elements % width > 0:
                rest = T.meta_var(elements % width)
                self._add_strip(kv, first_row, row, elements - rest, rest, first, count)

    @inline
    def _add_strip(self, kv, first_row, weights_row, start, width, first, count, prefetches=True):
        """Add `width` elements of the columns of some positions of the block."""
        run, numbers, o = T.meta_var((min(kv.rows.run, STRIP), self.ops.numbers, self.rows.o))
        sums = T.alloc_local((self.blocking.rows, numbers, width), F32)
        for r in T.unroll(self.blocking.rows):
            for n in T.unroll(numbers):
                before = T.meta_var(
                    lambda c, m: load(o, (first_row + r, (start + c) * numbers + n * m), m)
                )
                store_row(sums, (r, n), width, self.lanes, before)
        if run == STRIP:
            self._add_rows(kv, sums, weights_row, start, width, first, count, prefetches)
        else:
            for i in range((count + run - 1) // run):
                at = first + i * run
                num_rows = T.min(run, count - i * run)
                self._add_rows(kv, sums, weights_row, start, width, at, num_rows, prefetches)
        for r in T.unroll(self.blocking.rows):
            self._put_sums(sums, r, first_row + r, start, width)

    def _put_sums(self, sums, r, row, start, width: int) -> None:
        numbers = self.ops.numbers
        for column, lanes in chunks(width, self.lanes):
            for n in range(numbers):
                at = (row, (start + column) * numbers + n * lanes)
                store(self.rows.o, at, lanes, load(sums, (r, n, column), lanes))

    @inline
    def _add_rows(self, kv, sums, weights_row, start, width, first, count, prefetches):
        """Add some elements of the columns of `count` rows of V, which share a page or a strip."""
        ops, numbers = T.meta_var((self.ops, self.ops.numbers))
        run, num_rows = T.meta_var((min(kv.rows.run, STRIP), self.blocking.rows))
        tile = kv.rows.tile(kv.first + first, run)
        following = kv.following.tile(kv.following_first + first, run)
        line = T.meta_var(elements_per_line(self.spec.v_dtype) // numbers)

        @inline
        def prefetch(t):
            for i in T.unroll((width + line - 1) // line):
                column = T.meta_var((start + i * line) * numbers)
                following.prefetch_v(t, column)
                following.prefetch_k(t, column)
                if run > SOON:
                    tile.prefetch_v(t + SOON, column)

        hidden = T.max(kv.num_hidden - first, 0)
        begin = hidden // numbers
        end = T.if_then_else(hidden < count, (count + numbers - 1) // numbers, begin)
        for i in range(begin, end):
            t = T.meta_var(self._positions(i, hidden, count))
            if prefetches:
                prefetch(t[0])
            if numbers == 2:
                prefetch(t[1])
            weights = T.alloc_local((num_rows,), ops.dtype)
            for r in T.unroll(num_rows):
                weights[r] = self.rows.weights[weights_row + r, first // numbers + i]
            for v in T.unroll(width // self.lanes):
                self._add_vector(tile, t, sums, weights, start, v * self.lanes, self.lanes)
            if width % self.lanes > 0:
                rest = T.meta_var(width % self.lanes)
                self._add_vector(tile, t, sums, weights, start, width - rest, rest)

    def _add_vector(self, tile, t, sums, weights, start, column, lanes: int) -> None:
        """Add the weighted products of a vector of elements of the rows `t`."""
        ops = self.ops
        for n, value in enumerate(ops.load_v(tile, t, start + column, lanes)):
            value = temp(value, lanes, ops.dtype)
            for r in range(self.blocking.rows):
                total, weight = load(sums, (r, n, column), lanes), broadcast(weights[r], lanes)
                store(sums, (r, n, column), lanes, ops.fma(total, weight, value, lanes))

    def _positions(self, i, hidden, count) -> list:
        """Return the rows of an element; a hidden one, whose weight is 0, gives way to another."""
        numbers = self.ops.numbers
        if numbers == 1:
            return [i]
        rows = (i * numbers + n for n in range(numbers))
        return [index_temp(T.min(T.max(row, hidden), count - 1)) for row in rows]

    @inline
    def finish(self, num_heads):
        """Put the sums of the local heads into the order of the columns."""
        if self.ops.numbers == 2:
            for row in range(num_heads * self.blocking.padded_rows):
                self._order_columns(row)

    def _order_columns(self, row) -> None:
        o = self.rows.o
        for element, lanes in chunks(self.spec.v_head_dim // 2, self.lanes):
            at = [(row, element * 2 + n * lanes) for n in range(2)]
            halves = [temp(load(o, i, lanes), lanes) for i in at]
            order = [n * lanes + i for i in range(lanes) for n in range(2)]
            for n, i in enumerate(at):
                store(o, i, lanes, shuffle(halves, order[n * lanes : (n + 1) * lanes]))
