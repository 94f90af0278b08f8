# SPDX-License-Identifier: Apache-2.0
"""Scores of blocks of rows and a tile of positions, their weights, and the softmax between."""

from dataclasses import dataclass
from typing import Any

from tvm.script import tirx as T

from ...script import inline
from ...semantics.softmax import HIDDEN
from ..isa.simd import constant, load, store
from ..softmax.online_softmax import OnlineSoftmax
from .kv_tile import POSITIONS
from .row_bounds import TileView


@dataclass(frozen=True)
class TileScores:
    """Scores of the rows of a view and the positions of its tile.

    Parameters
    ----------
    buffer : float32 Buffer ``[row of the view, position]``
        Logits times log2(e).
    weights : Buffer ``[row of the view, element of positions]``
        Receives their weights; the same buffer where both are float32.
    view : TileView
    lanes : int
        Lanes of a vector of scores.
    """

    buffer: Any
    weights: Any
    view: TileView
    lanes: int

    @inline
    def add_bias(self, bias, first_position, offsets):
        """Add the ALiBi bias for columns at ``first_position + offsets(column, lanes)``."""
        for i in range(self.view.num_rows):
            bias.add(self.view.first_row + i, self.buffer, i, first_position, offsets)

    @inline
    def hide(self):
        """Hide the columns that a row does not see."""
        for i in range(self.view.num_rows):
            visible = T.meta_var(self.view.visible_to(i))
            for v in T.unroll(POSITIONS // self.lanes):
                at = T.meta_var((i, v * self.lanes))
                score = T.meta_var(load(self.buffer, at, self.lanes))
                hidden = T.meta_var(constant(HIDDEN, self.lanes))
                seen = T.meta_var(visible(v * self.lanes, self.lanes))
                store(self.buffer, at, self.lanes, T.Select(seen, score, hidden))


@dataclass(frozen=True)
class TileWeights:
    """The weights of the rows of a view, and what earlier sums of these rows are multiplied by.

    Parameters
    ----------
    buffer : Buffer ``[row of the view, element of positions]``
    softmax : TileSoftmax
    view : TileView
    """

    buffer: Any
    softmax: Any
    view: TileView

    def rescale_of(self, block) -> tuple:
        """Return buffer and index of the factor of the first row of one of the view's blocks."""
        blocks = self.softmax.blocks
        return blocks.rescale, blocks.index(self.view.block + block, 0)

    def rescale(self, row):
        """The factor of a row of the tile."""
        return self.softmax.blocks.rescale[self.softmax.index(row)]


@T.meta_class
class TileSoftmax:
    """The online softmax of the rows of a tile, block by block.

    Parameters
    ----------
    tiling : Tiling
    ops : operands object
    lanes : int
        Lanes of a vector of scores.
    """

    def __init__(self, tiling, ops, lanes: int):
        self.ops, self.block_rows = ops, tiling.rows
        self.blocks = OnlineSoftmax(tiling.num_blocks, tiling.rows, lanes)

    def reset(self, block) -> None:
        """Forget all positions that the rows of a block have seen."""
        self.blocks.reset(block)

    def update(self, scores: TileScores) -> TileWeights:
        """Take in scores, and return their weights ``exp2(score - maximum)``."""
        self._update(scores)
        return TileWeights(scores.weights, self, scores.view)

    @inline
    def _update(self, scores):
        for j in range(scores.view.count):
            row = j * self.block_rows
            block = T.meta_var(scores.view.block + j)
            self.blocks.update(block, scores.buffer, row, scores.weights, self.ops)

    def index(self, row):
        """Return the index of a row of the tile in the arrays of `blocks`."""
        return self.blocks.index(row // self.block_rows, row % self.block_rows)

    def state(self, row) -> tuple:
        """Return the maximum of a row of the tile, and its sum of weights."""
        return self.blocks.row_max[self.index(row)], self.blocks.row_sum[self.index(row)]
