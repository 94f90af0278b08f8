# SPDX-License-Identifier: Apache-2.0
"""The online softmax of rows that lie along the lanes of vectors; see `lane_rows`."""

from typing import NamedTuple

from tvm.script import tirx as T

from ...script import inline
from ...semantics.softmax import HIDDEN, NOTHING_SEEN
from ...spec import KernelSpec
from ..isa.simd import F32, constant, exp2, load, store
from .kv_tile import POSITIONS
from .lane_rows import LaneMask, LaneView, vectors_of


class LaneScores(NamedTuple):
    """Scores of the rows of a view and the positions of its tile.

    Parameters
    ----------
    buffer : float32 Buffer ``[vector of the block, position, lane]``
        Logits times log2(e).
    view : LaneView
    """

    buffer: object
    view: LaneView

    @inline
    def hide_rest(self):
        """Hide the positions that no row sees."""
        view, tile = T.meta_var((self.view, self.view.block.tile))
        for i in range(view.num_positions - view.num_seen):
            for n in T.unroll(tile.vectors):
                hidden = T.meta_var(constant(HIDDEN, tile.lanes))
                store(self.buffer, (n, view.num_seen + i, 0), tile.lanes, hidden)

    @inline
    def hide(self, begin, mask: LaneMask):
        """Hide what rows do not see, of the positions of the tile from number `begin` on."""
        view, tile = T.meta_var((self.view, self.view.block.tile))
        for i in range(view.num_positions - begin):
            for n in T.unroll(tile.vectors):
                at = T.meta_var((n, begin + i, 0))
                row = T.meta_var(view.block.first_row + n * tile.lanes)
                is_seen = T.meta_var(mask.visible(view.first, begin + i, row))
                score = T.meta_var(load(self.buffer, at, tile.lanes))
                hidden = T.meta_var(constant(HIDDEN, tile.lanes))
                store(self.buffer, at, tile.lanes, T.Select(is_seen, score, hidden))


class LaneWeights(NamedTuple):
    """The weights of the rows of a view, and what earlier sums of these rows are multiplied by.

    Parameters
    ----------
    buffer : Buffer ``[vector of the block, element of positions, lane]``
    rescale : float32 Buffer ``[row of the block]``
    view : LaneView
    """

    buffer: object
    rescale: object
    view: LaneView

    def at(self, element, row) -> tuple:
        """Return buffer and index of the weights of a vector of the block's rows."""
        return self.buffer, (row // self.view.block.tile.lanes, element, 0)


@T.meta_class
class LaneSoftmax:
    """Running maxima and sums of rows: online softmax.

    Parameters
    ----------
    spec : KernelSpec
    ops : operands object
    max_rows : int

    Attributes
    ----------
    row_max, row_sum : float32 Buffers ``[row]``
    """

    def __init__(self, spec: KernelSpec, ops, max_rows: int):
        self.ops, self.lanes = ops, ops.lanes
        lanes, vectors = self.lanes, vectors_of(spec)
        num_rows = -(-max_rows // lanes) * lanes
        self.weights = None  # those of float32 take the place of their scores
        if ops.dtype != F32:
            self.weights = T.alloc_buffer(
                (vectors, POSITIONS // ops.values_per_element, lanes), ops.dtype
            )
        self.rescale = T.alloc_buffer((vectors * lanes,), F32)
        self.row_max = T.alloc_buffer((num_rows,), F32)
        self.row_sum = T.alloc_buffer((num_rows,), F32)

    @inline
    def reset(self, vector):
        """Forget all positions."""
        lanes = T.meta_var(self.lanes)
        store(self.row_max, (vector * lanes,), lanes, constant(NOTHING_SEEN, lanes))
        store(self.row_sum, (vector * lanes,), lanes, constant(0.0, lanes))

    def update(self, scores: LaneScores) -> LaneWeights:
        """Take in scores, and return their weights ``exp2(score - maximum)``."""
        buffer = scores.buffer if self.weights is None else self.weights
        self._update(scores, buffer)
        return LaneWeights(buffer, self.rescale, scores.view)

    @inline
    def _update(self, scores, buffer):
        lanes, numbers = T.meta_var(self.lanes), T.meta_var(self.ops.values_per_element)
        maxima = T.alloc_local((4, lanes), F32)
        totals = T.alloc_local((2, lanes), F32)
        weights = T.alloc_local((numbers, lanes), F32)
        for n in T.unroll(scores.view.block.tile.vectors):
            row = T.meta_var(scores.view.block.first_row + n * lanes)
            old = load(self.row_max, (row,), lanes)
            for j in T.unroll(4):
                maxima[j, T.ramp(0, 1, lanes)] = old
            for i in range(scores.view.num_positions // 4):
                for j in T.unroll(4):
                    score = T.meta_var(load(scores.buffer, (n, i * 4 + j, 0), lanes))
                    top = T.meta_var(T.max(load(maxima, (j, 0), lanes), score))
                    maxima[j, T.ramp(0, 1, lanes)] = top
            a, b, c, d = T.meta_var([load(maxima, (j, 0), lanes) for j in range(4)])
            top = T.max(T.max(a, b), T.max(c, d))
            for j in T.unroll(2):
                totals[j, T.ramp(0, 1, lanes)] = constant(0.0, lanes)
            for i in range(scores.view.num_positions // (2 * numbers)):
                for j in T.unroll(2):
                    for m in T.unroll(numbers):
                        at = T.meta_var((n, (i * 2 + j) * numbers + m, 0))
                        score = T.meta_var(load(scores.buffer, at, lanes))
                        weights[m, T.ramp(0, 1, lanes)] = exp2(score - top, lanes)
                        totals[j, T.ramp(0, 1, lanes)] += load(weights, (m, 0), lanes)
                    pair = T.meta_var([load(weights, (m, 0), lanes) for m in range(numbers)])
                    element = T.meta_var(self.ops.repack(pair))
                    store(buffer, (n, i * 2 + j, 0), lanes, element, self.ops.dtype)
            rescale = exp2(old - top, lanes)
            store(self.rescale, (n * lanes,), lanes, rescale)
            store(self.row_max, (row,), lanes, top)
            earlier = T.meta_var(load(self.row_sum, (row,), lanes) * rescale)
            total = T.meta_var(earlier + load(totals, (0, 0), lanes) + load(totals, (1, 0), lanes))
            store(self.row_sum, (row,), lanes, total)
