# SPDX-License-Identifier: Apache-2.0
"""Scores, weights and sums of rows that lie along the lanes of vectors; see `lane_rows`."""

from tvm.script import tirx as T

from ...script import inline
from ...semantics.softmax import HIDDEN, NOTHING_SEEN
from ...spec import KernelSpec
from ..isa.simd import F32, broadcast, constant, exp2, load, store
from .kv_tile import POSITIONS, KvTile, rounded
from .lane_rows import LaneMask, LaneQueries, RowBlock, transpose_block, vectors_of


@T.meta_class
class LaneSoftmax:
    """Scores of a block of rows, and the running maximum and sum of every row: online softmax.

    Scores and weights are ``[vector of the block, position, lane]``. `decay` is what the sums of a
    row so far have to be multiplied by.
    """

    def __init__(self, spec: KernelSpec, ops, max_rows: int):
        self.ops, self.lanes = ops, ops.lanes
        lanes, vectors = self.lanes, vectors_of(spec)
        num_rows = -(-max_rows // lanes) * lanes
        self.scores = T.alloc_buffer((vectors, POSITIONS, lanes), F32)
        self.weights = (
            self.scores
            if ops.dtype == F32
            else T.alloc_buffer((vectors, POSITIONS // ops.values_per_element, lanes), ops.dtype)
        )
        self.decay = T.alloc_buffer((vectors * lanes,), F32)
        self.row_max = T.alloc_buffer((num_rows,), F32)
        self.row_sum = T.alloc_buffer((num_rows,), F32)

    @inline
    def reset(self, vector):
        """Forget all positions."""
        lanes = T.meta_var(self.lanes)
        store(self.row_max, (vector * lanes,), lanes, constant(NOTHING_SEEN, lanes))
        store(self.row_sum, (vector * lanes,), lanes, constant(0.0, lanes))

    @inline
    def score(self, q: LaneQueries, kv: KvTile, block: RowBlock, first, k_offset, num_seen):
        """``S^T = K Q^T`` of the first `num_seen` positions of a tile, which begins at `first`."""
        tile, lanes = T.meta_var((block.tile, self.lanes))
        for i in range((num_seen + tile.rows - 1) // tile.rows):
            start = i * tile.rows
            ahead = T.meta_var(kv.ahead(first, block, i, is_v=False))
            tile.clear()
            tile.multiply(kv.k, start, q, block.first_row, kv.padded_depth, ahead)
            tile.take_sums()
            for j in T.unroll(tile.rows):
                for n in T.unroll(tile.vectors):
                    row = T.meta_var(block.first_row + n * lanes)
                    product, position = T.meta_var((tile.sums[tile.at(j, n)], first + start + j))
                    logit = T.meta_var(q.logit(product, row, k_offset + position))
                    store(self.scores, (n, start + j, 0), lanes, logit)

    def at(self, element, row) -> tuple:
        """Return buffer and index of the weights of a vector of the block's rows."""
        return self.weights, (row // self.lanes, element, 0)

    @inline
    def hide_from(self, block: RowBlock, num_seen):
        """Hide the positions from `num_seen` on, of those that `update` takes."""
        for i in range(rounded(num_seen) - num_seen):
            for n in T.unroll(block.tile.vectors):
                hidden = T.meta_var(constant(HIDDEN, self.lanes))
                store(self.scores, (n, num_seen + i, 0), self.lanes, hidden)

    @inline
    def hide(self, block: RowBlock, first, begin, num_seen, mask: LaneMask):
        """Hide what rows do not see of the positions ``begin .. num_seen - 1`` of a tile."""
        for i in range(rounded(num_seen) - begin):
            for n in T.unroll(block.tile.vectors):
                at = T.meta_var((n, begin + i, 0))
                row = T.meta_var(block.first_row + n * self.lanes)
                is_seen = T.meta_var(mask.visible(first, begin + i, row))
                score = T.meta_var(load(self.scores, at, self.lanes))
                hidden = T.meta_var(constant(HIDDEN, self.lanes))
                store(self.scores, at, self.lanes, T.Select(is_seen, score, hidden))

    @inline
    def update(self, block: RowBlock, num_seen):
        """Turn scores into weights; update maxima and sums, and say how earlier sums decay."""
        lanes, numbers = T.meta_var(self.lanes), T.meta_var(self.ops.values_per_element)
        maxima = T.alloc_local((4, lanes), F32)
        totals = T.alloc_local((2, lanes), F32)
        weights = T.alloc_local((numbers, lanes), F32)
        for n in T.unroll(block.tile.vectors):
            row = T.meta_var(block.first_row + n * lanes)
            old = load(self.row_max, (row,), lanes)
            for j in T.unroll(4):
                maxima[j, T.ramp(0, 1, lanes)] = old
            for i in range(rounded(num_seen) // 4):
                for j in T.unroll(4):
                    score = T.meta_var(load(self.scores, (n, i * 4 + j, 0), lanes))
                    top = T.meta_var(T.max(load(maxima, (j, 0), lanes), score))
                    maxima[j, T.ramp(0, 1, lanes)] = top
            a, b, c, d = T.meta_var([load(maxima, (j, 0), lanes) for j in range(4)])
            top = T.max(T.max(a, b), T.max(c, d))
            for j in T.unroll(2):
                totals[j, T.ramp(0, 1, lanes)] = constant(0.0, lanes)
            for i in range(rounded(num_seen) // (2 * numbers)):
                for j in T.unroll(2):
                    for m in T.unroll(numbers):
                        at = T.meta_var((n, (i * 2 + j) * numbers + m, 0))
                        score = T.meta_var(load(self.scores, at, lanes))
                        weights[m, T.ramp(0, 1, lanes)] = exp2(score - top, lanes)
                        totals[j, T.ramp(0, 1, lanes)] += load(weights, (m, 0), lanes)
                    pair = T.meta_var([load(weights, (m, 0), lanes) for m in range(numbers)])
                    element = T.meta_var(self.ops.repack(pair))
                    store(self.weights, (n, i * 2 + j, 0), lanes, element, self.ops.dtype)
            decay = exp2(old - top, lanes)
            store(self.decay, (n * lanes,), lanes, decay)
            store(self.row_max, (row,), lanes, top)
            earlier = T.meta_var(load(self.row_sum, (row,), lanes) * decay)
            total = T.meta_var(earlier + load(totals, (0, 0), lanes) + load(totals, (1, 0), lanes))
            store(self.row_sum, (row,), lanes, total)


@T.meta_class
class LaneSums:
    """Sums of weighted rows of V as ``[vector, column, lane]``; at last rows of `o`."""

    def __init__(self, spec: KernelSpec, ops, max_rows: int):
        self.ops, self.lanes, self.width = ops, ops.lanes, spec.v_head_dim
        vectors = -(-max_rows // self.lanes)
        self.sums = T.alloc_buffer((vectors, self.width, self.lanes), F32)
        self.o = T.alloc_buffer((vectors * self.lanes, self.width), F32)

    @inline
    def clear(self, vector):
        """Forget all positions."""
        for column in range(self.width):
            store(self.sums, (vector, column, 0), self.lanes, constant(0.0, self.lanes))

    @inline
    def add(self, kv: KvTile, softmax: LaneSoftmax, block: RowBlock, first, num_seen):
        """``O^T = O^T * decay + V^T P^T`` over the first `num_seen` positions of a tile."""
        tile, lanes = T.meta_var((block.tile, self.lanes))
        for i in range(self.width // tile.rows):
            start = i * tile.rows
            column = kv.column(start)
            ahead = T.meta_var(kv.ahead(first, block, i, is_v=True))
            for j in T.unroll(tile.rows):
                for n in T.unroll(tile.vectors):
                    at = T.meta_var((block.vector + n, column + j * kv.column_step, 0))
                    decay = T.meta_var(load(softmax.decay, (n * lanes,), lanes))
                    tile.sums[tile.at(j, n)] = load(self.sums, at, lanes) * decay
            depth = T.meta_var(rounded(num_seen) // self.ops.values_per_element)
            tile.multiply(kv.columns_of_v, start, softmax, 0, depth, ahead)
            for j in T.unroll(tile.rows):
                for n in T.unroll(tile.vectors):
                    at = T.meta_var((block.vector + n, column + j * kv.column_step, 0))
                    store(self.sums, at, lanes, tile.sums[tile.at(j, n)])

    @inline
    def add_seen(
        self, kv: KvTile, softmax: LaneSoftmax, block: RowBlock, first, num_seen, mask: LaneMask
    ):
        """Do what `add` does where V is not finite: leave out what a row does not see."""
        for scalar in range(self.width):
            column = kv.column(scalar // 8 * 8) + scalar % 8 * kv.column_step
            for n in T.unroll(block.tile.vectors):
                at = T.meta_var((block.vector + n, column, 0))
                row = T.meta_var(block.first_row + n * self.lanes)
                visible = T.meta_var(lambda position, row=row: mask.visible(first, position, row))
                self.add_column(self.sums, at, kv, softmax, n, scalar, num_seen, visible)

    @inline
    def add_column(self, sums, at, kv, softmax, n, scalar, num_seen, visible):
        """Add what `visible` of a position says of a column of V to sums of a vector of rows."""
        decay = T.meta_var(load(softmax.decay, (n * self.lanes,), self.lanes))
        total = load(sums, at, self.lanes) * decay
        for k in range(rounded(num_seen) // self.ops.values_per_element):
            pair = T.meta_var(load(softmax.weights, (n, k, 0), self.lanes, self.ops.dtype))
            weights = T.meta_var(self.ops.unpack(pair))
            v = T.meta_var(self.ops.unpack(broadcast(kv.v[k, scalar], self.lanes)))
            position = T.meta_var(k * self.ops.values_per_element)
            zero = T.meta_var(constant(0.0, self.lanes))
            is_seen = T.meta_var(visible(position))
            total += T.Select(is_seen, weights[0] * v[0], zero)
            if self.ops.values_per_element == 2:
                is_seen = T.meta_var(visible(position + 1))
                total += T.Select(is_seen, weights[1] * v[1], zero)
        store(sums, at, self.lanes, total)

    @inline
    def transpose(self, num_vectors):
        """Turn the sums into rows of `o`."""
        for vector in range(num_vectors):
            transpose_block(
                lambda column, row, n: load(self.sums, (vector, column, row), n),
                lambda row, column, n, value: store(
                    self.o, (vector * self.lanes + row, column), n, value
                ),
                self.width,
                self.lanes,
                F32,
            )

    def state(self, row, softmax: LaneSoftmax) -> tuple:
        """Return where a row of `o` is, and its maximum and sum."""
        return self.o, row, softmax.row_max[row], softmax.row_sum[row]
