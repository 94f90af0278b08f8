# SPDX-License-Identifier: Apache-2.0
"""Products of single query rows with K and V as they lie in the pages.

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
    index_temp,
    load,
    shuffle,
    store,
    store_row,
    temp,
)
from .kv_blocks import BLOCK, TILE, KvBlocks
from .local_rows import Blocking
from .prefetch import FloatPrefetch


@T.meta_class
class FloatQK:
    """Multiplies rows of Q with rows of K, which it rotates first where the call asks for it.

    Parameters
    ----------
    spec : KernelSpec
    ops : operands object
    rope : rotation object
    factor : float32
        Factor of the scores, for operands whose Q has not taken it in.
    """

    def __init__(self, spec: KernelSpec, ops, rope, factor):
        self.spec, self.ops, self.rope, self.factor = spec, ops, rope, factor
        self.lanes, self.blocking = spec.target.lanes, Blocking.of(spec)
        self.elements = spec.qk_head_dim // ops.values_per_element  # of a row of Q
        self.prefetches = FloatPrefetch(spec, ops.values_per_element)
        self.rotated = T.alloc_buffer((self.blocking.positions, self.elements), ops.dtype)
        if rope.rotates_k is not False:
            self.angles = rope.angles_of(BLOCK)  # of the block, for all local heads

    @inline
    def begin_head(self, q, local_head):
        """Rows of Q are multiplied as they were loaded."""

    @inline
    def begin_block(self, kv: KvBlocks, k_offset):
        """Compute the angles of a block of positions, for all local heads."""
        count, rope = T.meta_var((self.blocking.positions, self.rope))
        if rope.rotates_k:
            for t in range((kv.count + count - 1) // count * count):
                rope.set_position(k_offset + kv.first + t, self.angles, t)

    @inline
    def multiply(self, q, kv: KvBlocks, scores):
        """``S = Q K^T`` for a local head and a block of positions."""
        count, ops, rope, rotated = T.meta_var(
            (self.blocking.positions, self.ops, self.rope, self.rotated)
        )
        for i in range((kv.count + count - 1) // count):
            position = kv.first + i * count
            tile = kv.rows.tile(position, count)
            prefetch = T.meta_var(self.prefetches.beside_k(kv, tile, position, i * count, count))
            if rope.rotates_k:
                for t in range(count):
                    row = kv.rows.tile(position + t, 1)
                    rope.rotate(lambda c, n: row.load_k(0, c, n), self.angles, i * count + t)
                    packed = T.meta_var(lambda c, n: ops.pack(rope.row, c, n))
                    store_row(rotated, (t,), self.elements, self.lanes, packed, ops.dtype)
                for row_set in range(self.blocking.row_sets):
                    k = T.meta_var(lambda t, c, n: load(rotated, (t, c), n, ops.dtype))
                    self._multiply_tile(q, k, prefetch, scores, kv.local_head, row_set, i * count)
            else:
                for row_set in range(self.blocking.row_sets):
                    k = T.meta_var(lambda t, c, n: ops.load_k(tile, t, c, n))
                    self._multiply_tile(q, k, prefetch, scores, kv.local_head, row_set, i * count)

    @inline
    def _multiply_tile(self, q, k, prefetch, scores, local_head, row_set, column):
        """Multiply a row set with a tile of K, whose elements are ``k(row, column, n)``."""
        num_rows, count, lanes = T.meta_var(
            (self.blocking.rows, self.blocking.positions, self.lanes)
        )
        first_row = (local_head * self.blocking.row_sets + row_set) * num_rows
        sums = T.alloc_local((num_rows, count * lanes), F32)
        for r in T.unroll(num_rows):
            for t in T.unroll(count):
                store(sums, (r, t * lanes), lanes, constant(0.0, lanes))
        line, width = T.meta_var((self.prefetches.k_line, self.elements))

        @inline
        def multiply_line(start, width):
            for t in T.unroll(count):
                prefetch(t, start)
            for v in T.unroll(width // lanes):
                self._multiply_vector(q, first_row, k, start + v * lanes, lanes, sums)
            if width % lanes > 0:
                rest = T.meta_var(width % lanes)
                self._multiply_vector(q, first_row, k, start + width - rest, rest, sums)

        for i in range(width // line):
            multiply_line(i * line, line)
        if width % line > 0:
            multiply_line(width - width % line, width % line)
        self._store_scores(sums, scores, row_set * num_rows, column)

    @inline
    def _multiply_vector(self, q, first_row, k, column, n, sums):
        """Add the products of `n` elements from `column` on."""
        dtype, ops, lanes = T.meta_var((self.ops.dtype, self.ops, self.lanes))
        factors = T.alloc_local((self.blocking.rows, n), dtype)
        for r in T.unroll(self.blocking.rows):
            value = T.meta_var(load(q, (first_row + r, column), n, dtype))
            store(factors, (r, 0), n, value, dtype)
        for t in T.unroll(self.blocking.positions):
            row = k(t, column, n)
            for r in T.unroll(self.blocking.rows):
                at, factor = T.meta_var(((r, t * lanes), load(factors, (r, 0), n, dtype)))
                if n == lanes:
                    store(sums, at, lanes, ops.fma(load(sums, at, lanes), factor, row, n))
                else:
                    narrow = ops.fma(constant(0.0, n), factor, row, n)
                    store(sums, at, lanes, load(sums, at, lanes) + widen(narrow, n))

    def _store_scores(self, sums, scores, first_row, column) -> None:
        """Add up the lanes of the sums, and store them as columns of the scores."""
        factor = None if self.ops.scale_in_q else self.factor
        store_lane_sums(sums, scores, first_row, column, self.blocking, self.lanes, factor)


def store_lane_sums(
    sums, scores, first_row, column, blocking: Blocking, lanes: int, factor=None
) -> None:
    """Add up the lanes of the sums of a row set and a tile, and store them as scores.

    Parameters
    ----------
    sums : float32 ``[row, position * lanes]``
    scores : float32 ``[row of a local head, BLOCK]``
    first_row, column : int32 expression
        Where the scores of the first row and position are.
    blocking : Blocking
    lanes : int
    factor : float32 expression, optional
        What scores are multiplied with.
    """
    rows, count = range(blocking.rows), blocking.positions
    at_once = max(1, lanes // count)
    for first in range(0, len(rows), at_once):
        batch = rows[first : first + at_once]
        vectors = [load(sums, (r, t * lanes), lanes) for r in batch for t in range(count)]
        totals = reduce_each(vectors, lanes, add)
        if factor is not None:
            width = next_power_of_two(len(vectors))
            totals = temp(totals * broadcast(factor, width), width)
        for i, r in enumerate(batch):
            own = range(i * count, (i + 1) * count)
            value = shuffle([totals], own) if len(vectors) > 1 else totals
            store(scores, (first_row + r, column), count, value)


@T.meta_class
class FloatPV:
    """Adds rows of V, times their weights, to rows of O.

    Parameters
    ----------
    spec : KernelSpec
    ops : operands object
    """

    def __init__(self, spec: KernelSpec, ops):
        self.spec, self.ops, self.lanes = spec, ops, spec.target.lanes
        self.blocking, self.prefetches = (
            Blocking.of(spec),
            FloatPrefetch(spec, ops.values_per_element),
        )

    @inline
    def load_v(self, kv: KvBlocks):
        """V is read where it lies."""

    @inline
    def multiply(self, weights, kv: KvBlocks, o, rescale, row_set):
        """``O = O * rescale + P V`` for a row set; positions that are not visible are not read.

        All columns of a tile of V come before the next tile, so that memory is read in order.
        """
        num_rows = T.meta_var(self.blocking.rows)
        first_row = (kv.local_head * self.blocking.row_sets + row_set) * num_rows
        for i in range(num_rows):
            row, width = T.meta_var((first_row + i, self.spec.v_head_dim))
            factor = rescale(row)
            decayed = T.meta_var(lambda c, n: load(o, (row, c), n) * broadcast(factor, n))
            store_row(o, (row,), width, self.lanes, decayed)
        elements = T.meta_var(self.spec.v_head_dim // self.ops.values_per_element)
        width = T.meta_var(
            max(1, self.blocking.vectors // self.ops.values_per_element) * self.lanes
        )
        # Of the columns of a cache line, those that are multiplied first prefetch.
        per_line = T.meta_var(max(1, self.prefetches.v_line // width))
        for i in range((kv.count + TILE - 1) // TILE):
            first = T.meta_var(i * TILE)
            count = T.min(TILE, kv.count - first)
            row = T.meta_var(row_set * num_rows)
            add = T.meta_var(
                lambda start, width, prefetches=True: self._multiply_tile(
                    weights, row, kv, first, count, o, first_row, start, width, prefetches
                )
            )
            for j in range(elements // width // per_line):
                start = T.meta_var(j * (per_line * width))
                add(start, width)
                if per_line > 1:
                    for k in range(per_line - 1):
                        add(start + (k + 1) * width, width, False)
            if per_line > 1:
                for j in range(elements // width % per_line):
                    add((elements // width // per_line * per_line + j) * width, width)
            if elements % width > 0:
                rest = T.meta_var(elements % width)
                add(elements - rest, rest)

    @inline
    def _multiply_tile(
        self, weights, weights_row, kv, first, count, o, first_row, start, width, prefetches
    ):
        """Add the products with `width` elements from `start` on of a tile of V."""
        run, per_element = T.meta_var((min(kv.rows.run, TILE), self.ops.values_per_element))
        sums = T.alloc_local((self.blocking.rows, per_element, width), F32)
        for r in T.unroll(self.blocking.rows):
            for n in T.unroll(per_element):
                before = T.meta_var(
                    lambda c, m: load(o, (first_row + r, (start + c) * per_element + n * m), m)
                )
                store_row(sums, (r, n), width, self.lanes, before)
        add = T.meta_var(
            lambda first, count: self._add_rows(
                weights, weights_row, kv, first, count, start, width, sums, prefetches
            )
        )
        if run == TILE:
            add(first, count)
        else:
            for i in range((count + run - 1) // run):
                at = first + i * run
                num_rows = T.min(run, count - i * run)
                add(at, num_rows)
        for r in T.unroll(self.blocking.rows):
            self._put_sums(sums, r, o, first_row + r, start, width)

    def _put_sums(self, sums, r, o, row, start, width: int) -> None:
        per_element = self.ops.values_per_element
        for column, lanes in chunks(width, self.lanes):
            for n in range(per_element):
                at = (row, (start + column) * per_element + n * lanes)
                store(o, at, lanes, load(sums, (r, n, column), lanes))

    @inline
    def _add_rows(self, weights, weights_row, kv, first, count, start, width, sums, prefetches):
        """Add some elements of the columns of `count` rows of V, which share a page or a tile."""
        ops, per_element = T.meta_var((self.ops, self.ops.values_per_element))
        run, num_rows = T.meta_var((min(kv.rows.run, TILE), self.blocking.rows))
        tile = kv.rows.tile(kv.first + first, run)
        prefetch = T.meta_var(self.prefetches.beside_v(kv, tile, first, run))
        hidden = T.max(kv.num_hidden - first, 0)
        begin = hidden // per_element
        end = T.if_then_else(hidden < count, (count + per_element - 1) // per_element, begin)
        for i in range(begin, end):
            t = T.meta_var(self._positions(i, hidden, count))
            if prefetches:
                prefetch(t[0], start, width)
            if per_element == 2:
                prefetch(t[1], start, width)
            factors = T.alloc_local((num_rows,), ops.dtype)
            for r in T.unroll(num_rows):
                factors[r] = weights[weights_row + r, first // per_element + i]
            for v in T.unroll(width // self.lanes):
                self._add_vector(factors, tile, t, start, v * self.lanes, self.lanes, sums)
            if width % self.lanes > 0:
                rest = T.meta_var(width % self.lanes)
                self._add_vector(factors, tile, t, start, width - rest, rest, sums)

    def _add_vector(self, factors, tile, t, start, column, lanes: int, sums) -> None:
        """Add the weighted products of a vector of elements of the rows `t`."""
        ops = self.ops
        for n, value in enumerate(ops.load_v(tile, t, start + column, lanes)):
            value = temp(value, lanes, ops.dtype)
            for r in range(self.blocking.rows):
                total, weight = load(sums, (r, n, column), lanes), broadcast(factors[r], lanes)
                store(sums, (r, n, column), lanes, ops.fma(total, weight, value, lanes))

    def _positions(self, i, hidden, count) -> list:
        """Return the rows of an element; a hidden one, whose weight is 0, gives way to another."""
        per_element = self.ops.values_per_element
        if per_element == 1:
            return [i]
        rows = (i * per_element + n for n in range(per_element))
        return [index_temp(T.min(T.max(row, hidden), count - 1)) for row in rows]

    @inline
    def finish(self, o, num_heads):
        """Put the sums of the local heads into the order of the columns."""
        if self.ops.values_per_element == 2:
            for row in range(num_heads * self.blocking.padded_rows):
                self._order_columns(o, row)

    def _order_columns(self, o, row) -> None:
        for element, lanes in chunks(self.spec.v_head_dim // 2, self.lanes):
            at = [(row, element * 2 + n * lanes) for n in range(2)]
            halves = [temp(load(o, i, lanes), lanes) for i in at]
            order = [n * lanes + i for i in range(lanes) for n in range(2)]
            for n, i in enumerate(at):
                store(o, i, lanes, shuffle(halves, order[n * lanes : (n + 1) * lanes]))
