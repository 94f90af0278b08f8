# SPDX-License-Identifier: Apache-2.0
"""Scores of some blocks of rows and a tile of positions, and the weights that they become."""

from tvm.script import tirx as T

from ...script import inline
from ...semantics.softmax import HIDDEN
from ...spec import KernelSpec
from ..isa.matrices.register_tile import ColumnTiles
from ..isa.simd import F32, broadcast, constant, load, store
from ..softmax.logits import soft_cap
from .packed_kv import POSITIONS, PackedKv
from .query_tile import BLOCKS, QueryTile
from .row_bounds import TilePart


@T.meta_class
class ScoreTile:
    """``S = Q K^T``, in the exp2 domain, and then ``P = exp2(S - maximum)``.

    Parameters
    ----------
    spec : KernelSpec
    ops : operands object
    rows : QueryTile
    tiles : ColumnTiles

    Attributes
    ----------
    weights : Buffer ``[row, element of positions]``
    """

    def __init__(self, spec: KernelSpec, ops, rows: QueryTile, tiles: ColumnTiles):
        self.spec, self.ops, self.lanes = spec, ops, spec.target.lanes
        self.rows, self.tiles = rows, tiles
        num_rows = BLOCKS * rows.block_rows
        self.scores = T.alloc_buffer((num_rows, POSITIONS), F32)
        self.weights = (
            self.scores
            if ops.dtype == F32
            else T.alloc_buffer((num_rows, POSITIONS // ops.values_per_element), ops.dtype)
        )

    @inline
    def multiply(self, kv: PackedKv, source, part: TilePart):
        """Multiply Q with the columns of K that the rows see; prefetch rows of both meanwhile."""
        width = T.meta_var(self.tiles.wide.width)
        for i in range((part.num_seen(part.count - 1) + width - 1) // width):
            for j in range(part.count):
                num_columns = part.num_seen(j) - i * width
                if num_columns > 0:
                    kv.prefetch(source, i * self.rows.num_blocks + part.block + j)
                    self.rows.prefetch(part, i * part.count + j)
                    if num_columns > self.lanes:
                        self._multiply(self.tiles.wide, kv, part, j, i * width)
                    else:  # on the diagonal
                        self._multiply(self.tiles.single, kv, part, j, i * width)

    @inline
    def _multiply(self, tile, kv, part, block, column):
        row = block * self.rows.block_rows
        tile.clear()
        tile.multiply(self.rows.q, part.first_row + row, kv.k, column, kv.padded_depth)
        tile.take_sums()
        for i in T.unroll(tile.rows):
            for j in T.unroll(tile.vectors):
                logit = T.meta_var(self._logit(tile.sums[tile.at(i, j)]))
                store(self.scores, (row + i, column + j * self.lanes), self.lanes, logit)

    def _logit(self, value):
        if not self.ops.scale_in_q:
            value = value * broadcast(self.rows.factor, self.lanes)
        return soft_cap(value, self.spec.logit_softcap, self.lanes)

    @inline
    def add_bias(self, bias, part: TilePart, first_position, offsets):
        """Add the ALiBi bias for columns at ``first_position + offsets(column, lanes)``."""
        for i in range(part.num_rows):
            bias.add(part.first_row + i, self.scores, i, first_position, offsets)

    @inline
    def hide(self, part: TilePart):
        """Hide the columns that a row does not see."""
        for i in range(part.num_rows):
            visible = T.meta_var(part.visible_to(i))
            for v in T.unroll(POSITIONS // self.lanes):
                at = T.meta_var((i, v * self.lanes))
                score = T.meta_var(load(self.scores, at, self.lanes))
                hidden = T.meta_var(constant(HIDDEN, self.lanes))
                seen = T.meta_var(visible(v * self.lanes, self.lanes))
                store(self.scores, at, self.lanes, T.Select(seen, score, hidden))

    @inline
    def weigh(self, part: TilePart):
        """Turn scores into weights, and update the maxima and sums of the rows."""
        for j in range(part.count):
            row = j * self.rows.block_rows
            self.rows.softmax.update(part.block + j, self.scores, row, self.weights, self.ops)
