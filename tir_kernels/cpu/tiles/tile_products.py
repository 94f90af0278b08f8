# SPDX-License-Identifier: Apache-2.0
"""The two products of attention with tiles of rows: ``S = Q K^T`` and ``O = O * rescale + P V``."""

from tvm.script import tirx as T

from ...script import inline
from ...spec import KernelSpec
from ..isa.matrices.register_tile import ColumnTiles
from ..isa.simd import F32, broadcast, load, store
from ..softmax.logits import soft_cap
from .kv_tile import POSITIONS, KvTile
from .output_tile import OutputTile
from .query_tile import BLOCKS, QueryTile
from .row_bounds import TileView
from .tile_softmax import TileScores, TileWeights


@T.meta_class
class TileProducts:
    """Products of the blocks of rows of a view and a tile of K and V, with sums in registers.

    Parameters
    ----------
    spec : KernelSpec
    ops : operands object
    block_rows : int
        Rows of a block.
    tiles : ColumnTiles
    """

    def __init__(self, spec: KernelSpec, ops, block_rows: int, tiles: ColumnTiles):
        self.spec, self.ops, self.lanes = spec, ops, spec.target.lanes
        self.block_rows, self.tiles = block_rows, tiles
        num_rows = BLOCKS * block_rows
        self.scores = T.alloc_buffer((num_rows, POSITIONS), F32)
        self.weights = (
            self.scores
            if ops.dtype == F32
            else T.alloc_buffer((num_rows, POSITIONS // ops.values_per_element), ops.dtype)
        )

    def qk(self, q: QueryTile, kv: KvTile, view: TileView) -> TileScores:
        """Return the scores of a view, of the positions that a row sees.

        Meanwhile some of the next rows of K and V, and of Q, are prefetched.
        """
        scores = TileScores(self.scores, self.weights, view, self.lanes)
        self._multiply_q_k(q, kv, scores)
        return scores

    @inline
    def _multiply_q_k(self, q, kv, scores):
        width, view = T.meta_var((self.tiles.wide.width, scores.view))
        for i in range((view.num_seen(view.count - 1) + width - 1) // width):
            for j in range(view.count):
                num_columns = view.num_seen(j) - i * width
                if num_columns > 0:
                    kv.prefetch(i * q.num_blocks + view.block + j)
                    q.prefetch(view, i * view.count + j)
                    if num_columns > self.lanes:
                        self._multiply(self.tiles.wide, q, kv, scores, j, i * width)
                    else:  # on the diagonal
                        self._multiply(self.tiles.single, q, kv, scores, j, i * width)

    @inline
    def _multiply(self, tile, q, kv, scores, block, column):
        row = block * self.block_rows
        tile.clear()
        tile.multiply(q.q, scores.view.first_row + row, kv.k, column, kv.padded_depth)
        tile.take_sums()
        for i in T.unroll(tile.rows):
            for j in T.unroll(tile.vectors):
                logit = T.meta_var(self._logit(q, tile.sums[tile.at(i, j)]))
                store(scores.buffer, (row + i, column + j * self.lanes), self.lanes, logit)

    def _logit(self, q, value):
        if not self.ops.scale_in_q:
            value = value * broadcast(q.factor, self.lanes)
        return soft_cap(value, self.spec.logit_softcap, self.lanes)

    @inline
    def pv(self, o: OutputTile, weights: TileWeights, kv: KvTile):
        """Add the weighted rows of V to `o`."""
        self.tiles.each(lambda tile, column: self._add(tile, column, o, weights, kv))

    @inline
    def _add(self, tile, column, o, weights, kv):
        """Add some columns."""
        view = T.meta_var(weights.view)
        for j in range(view.count):
            row = j * self.block_rows
            first_row = view.first_row + row
            step = T.meta_var(tile.step * self.ops.values_per_element)
            depth = (view.num_seen(j) + step - 1) // step * tile.step
            o.load_rescaled(tile, first_row, column, weights.rescale_of(j))
            tile.multiply(weights.buffer, row, kv.v, column, depth)
            o.put(tile, first_row, column, view.completes(j), row)

    @inline
    def pv_seen(self, o: OutputTile, weights: TileWeights, kv: KvTile):
        """Do what `pv` does where V is not finite: row by row, over what each of them sees."""
        view = T.meta_var(weights.view)
        for i in range(view.num_rows):
            if o.is_new == 1:
                o.clear_row(view.first_row + i)
            self._add_row(i, o, weights, kv)
            if o.stores_early and view.completes(i // self.block_rows):
                o.store_row(view.first_row + i)

    @inline
    def _add_row(self, i, o, weights, kv):
        visible = T.meta_var(weights.view.visible_to(i))
        self.tiles.in_registers.each(
            lambda tile, column: self._add_visible(tile, column, o, i, weights, kv, visible)
        )

    @inline
    def _add_visible(self, tile, column, o, i, weights, kv, visible):
        """Add some columns of a row."""
        row = T.meta_var(weights.view.first_row + i)
        rescale = weights.rescale(row)
        for j in T.unroll(tile.vectors):
            sums = T.meta_var(load(o.o, (row, column + j * tile.lanes), tile.lanes))
            tile.sums[tile.at(0, j)] = sums * broadcast(rescale, tile.lanes)
        for k in range(POSITIONS // self.ops.values_per_element):
            weight = weights.buffer[i, k]
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
            store(o.o, at, tile.lanes, tile.sums[tile.at(0, j)])
