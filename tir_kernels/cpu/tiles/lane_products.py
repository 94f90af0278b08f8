# SPDX-License-Identifier: Apache-2.0
"""The two products of attention with rows that lie along the lanes of vectors; see `lane_rows`."""

from tvm.script import tirx as T

from ...script import inline
from ...spec import KernelSpec
from ..isa.simd import F32, broadcast, constant, load, store
from .kv_tile import POSITIONS
from .lane_kv import LaneKv
from .lane_rows import LaneMask, LaneQueries, LaneView, transpose_block, vectors_of
from .lane_softmax import LaneScores, LaneWeights


@T.meta_class
class LaneSums:
    """O, not yet divided by the sums of weights: ``[vector, column, lane]``, at last rows of `o`.

    Parameters
    ----------
    spec : KernelSpec
    ops : operands object
    max_rows : int

    Attributes
    ----------
    o : float32 Buffer ``[row, column]``
    """

    def __init__(self, spec: KernelSpec, ops, max_rows: int):
        self.lanes, self.width = ops.lanes, spec.v_head_dim
        vectors = -(-max_rows // self.lanes)
        self.sums = T.alloc_buffer((vectors, self.width, self.lanes), F32)
        self.o = T.alloc_buffer((vectors * self.lanes, self.width), F32)

    @inline
    def clear(self, vector):
        """Forget all positions."""
        for column in range(self.width):
            store(self.sums, (vector, column, 0), self.lanes, constant(0.0, self.lanes))

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

    def state(self, row, softmax) -> tuple:
        """Return where a row of `o` is, and its maximum and sum of weights."""
        return self.o, row, softmax.row_max[row], softmax.row_sum[row]


@T.meta_class
class LaneProducts:
    """``S^T = K Q^T`` and ``O^T = O^T * rescale + V^T P^T``, with sums in registers.

    Parameters
    ----------
    spec : KernelSpec
    ops : operands object
    """

    sums = LaneSums  # the form of O

    def __init__(self, spec: KernelSpec, ops):
        self.ops, self.lanes, self.width = ops, ops.lanes, spec.v_head_dim
        self.scores = T.alloc_buffer((vectors_of(spec), POSITIONS, self.lanes), F32)

    def qk(self, q: LaneQueries, kv: LaneKv, view: LaneView) -> LaneScores:
        """Return the scores of a view; meanwhile some rows of the next tile are prefetched."""
        scores = LaneScores(self.scores, view)
        self._multiply_q_k(q, kv, scores)
        return scores

    @inline
    def _multiply_q_k(self, q, kv, scores):
        view, block, lanes = T.meta_var((scores.view, scores.view.block, self.lanes))
        tile, first = T.meta_var((block.tile, view.first))
        for i in range((view.num_seen + tile.rows - 1) // tile.rows):
            start = i * tile.rows
            prefetch = T.meta_var(kv.prefetcher(first, block, i, is_v=False))
            tile.clear()
            tile.multiply(kv.k, start, q, block.first_row, kv.padded_depth, prefetch)
            tile.take_sums()
            for j in T.unroll(tile.rows):
                for n in T.unroll(tile.vectors):
                    row = T.meta_var(block.first_row + n * lanes)
                    product, position = T.meta_var((tile.sums[tile.at(j, n)], first + start + j))
                    logit = T.meta_var(q.logit(product, row, view.k_offset + position))
                    store(scores.buffer, (n, start + j, 0), lanes, logit)

    @inline
    def pv(self, o: LaneSums, weights: LaneWeights, kv: LaneKv):
        """Add the weighted rows of V to `o`."""
        view, block, lanes = T.meta_var((weights.view, weights.view.block, self.lanes))
        tile = T.meta_var(block.tile)
        for i in range(self.width // tile.rows):
            start = i * tile.rows
            column = kv.column(start)
            prefetch = T.meta_var(kv.prefetcher(view.first, block, i, is_v=True))
            for j in T.unroll(tile.rows):
                for n in T.unroll(tile.vectors):
                    at = T.meta_var((block.vector + n, column + j * kv.column_step, 0))
                    rescale = T.meta_var(load(weights.rescale, (n * lanes,), lanes))
                    tile.sums[tile.at(j, n)] = load(o.sums, at, lanes) * rescale
            depth = T.meta_var(view.num_positions // self.ops.values_per_element)
            tile.multiply(kv.columns_of_v, start, weights, 0, depth, prefetch)
            for j in T.unroll(tile.rows):
                for n in T.unroll(tile.vectors):
                    at = T.meta_var((block.vector + n, column + j * kv.column_step, 0))
                    store(o.sums, at, lanes, tile.sums[tile.at(j, n)])

    @inline
    def pv_seen(self, o: LaneSums, weights: LaneWeights, kv: LaneKv, mask: LaneMask):
        """Do what `pv` does where V is not finite: leave out what a row does not see."""
        view, block = T.meta_var((weights.view, weights.view.block))
        for scalar in range(self.width):
            column = kv.column(scalar // 8 * 8) + scalar % 8 * kv.column_step
            for n in T.unroll(block.tile.vectors):
                at = T.meta_var((block.vector + n, column, 0))
                row = T.meta_var(block.first_row + n * self.lanes)
                visible = T.meta_var(
                    lambda position, row=row: mask.visible(view.first, position, row)
                )
                self.add_column(o.sums, at, kv, weights, n, scalar, visible)

    @inline
    def add_column(self, sums, at, kv, weights, n, scalar, visible):
        """Add what `visible` of a position says of a column of V to sums of a vector of rows."""
        rescale = T.meta_var(load(weights.rescale, (n * self.lanes,), self.lanes))
        total = load(sums, at, self.lanes) * rescale
        for k in range(weights.view.num_positions // self.ops.values_per_element):
            element = T.meta_var(load(weights.buffer, (n, k, 0), self.lanes, self.ops.dtype))
            of_positions = T.meta_var(self.ops.unpack(element))
            v = T.meta_var(self.ops.unpack(broadcast(kv.v[k, scalar], self.lanes)))
            position = T.meta_var(k * self.ops.values_per_element)
            zero = T.meta_var(constant(0.0, self.lanes))
            is_seen = T.meta_var(visible(position))
            total += T.Select(is_seen, of_positions[0] * v[0], zero)
            if self.ops.values_per_element == 2:
                is_seen = T.meta_var(visible(position + 1))
                total += T.Select(is_seen, of_positions[1] * v[1], zero)
        store(sums, at, self.lanes, total)
