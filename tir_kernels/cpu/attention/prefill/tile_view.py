# SPDX-License-Identifier: Apache-2.0
"""The view that a prefill tile has of its rows and of a packed tile of K and V."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from tvm.script import tirx as T

from ....signatures.inputs import AttentionInputs
from ...simd import elements_per_line, index_temp, prefetch
from .row_bounds import RowBounds
from .tiling import POSITIONS


@dataclass(frozen=True)
class TileRows:
    """The rows of a tile in Q and O.

    Parameters
    ----------
    a : the kernel's arguments.
    at : callable
        ``row -> (token, query head)``
    last_position : int32 expression, optional
        Stands for RoPE positions beyond it.
    """

    a: AttentionInputs
    at: Callable
    last_position: object

    def prefetch(self, first_row, count: int) -> None:
        """Ask for `count` rows of Q."""
        q = self.a.q
        with T.serial(count) as i:
            at = self.at(first_row + i)
            for column in range(0, int(q.shape[-1]), elements_per_line(str(q.dtype))):
                prefetch(q, (*at, column))


@dataclass(frozen=True, kw_only=True)
class TileView:
    """Some blocks of rows, each a register tile high, and the packed tile that they attend to.

    Parameters
    ----------
    block, count, num_all : int32 expressions
        First block, their number, and the number of all blocks of the tile.
    prefetched_rows : int32 expression
        Rows of the next tile to prefetch with each product.
    first, first_row : int32 expressions
        First column of the packed tile, and first row of the blocks.
    bounds : RowBounds
        The columns that the rows see.
    factor : float32 expression
        Scale of the logits times log2(e).
    rows : TileRows, optional
    """

    block: object
    count: Any
    num_all: object
    prefetched_rows: object
    first: object
    first_row: Any
    bounds: RowBounds
    factor: object
    rows: TileRows | None

    def either(self, last_row, complete: Callable, incomplete: Callable) -> None:
        """Emit `complete` for a block whose `last_row` sees no column behind this tile."""
        if not self.rows or self.rows.a.rope.restores:
            incomplete()
            return
        left = index_temp(self.bounds.num_left(self.first, self.first_row + last_row))
        is_complete = T.And(T.And(left > 0, left <= POSITIONS), self.bounds.span.is_last)
        with T.If(is_complete):
            with T.Then():
                complete()
            with T.Else():
                incomplete()

    def num_seen(self, row):
        """Return how many columns some row up to that one of the blocks sees."""
        return self.bounds.num_seen(self.first, self.first_row + row)
