# SPDX-License-Identifier: Apache-2.0
"""Bounds on the columns that the rows of a tile see, so that tiles outside them are skipped.

The bounds are expressions of the mask; they occupy no memory.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from tvm.script import tirx as T

from ...semantics.visibility import CausalMask, Span
from ..isa.simd import broadcast, index_temp, ramp
from .kv_tile import POSITIONS
from .tile_queue import TileQueue


@dataclass(frozen=True)
class RowBounds:
    """The columns ``begin(row) .. end(row) - 1`` of a span, some of which the mask may hide.

    Neither bound is less for a later row of the tile.

    Parameters
    ----------
    mask : CausalMask
    span : Span
    tiles : TileQueue
        The tokens of the tile.
    rows : QueryTile
        Its rows; those past the end repeat the last one.
    kv_len : int32 expression
        Positions of the sequence.
    """

    mask: CausalMask
    span: Span
    tiles: TileQueue
    rows: Any
    kv_len: Any

    @property
    def has_gap(self) -> bool:
        """Whether some columns before the span were dropped."""
        return self.span.begin is not None

    @property
    def has_begin(self) -> bool:
        """Whether rows do not see some first columns."""
        return self.mask.has_window or self.has_gap

    def _token(self, row):
        return self.tiles.first_token + T.min(row, self.rows.num_rows - 1) // self.rows.group

    def end(self, row):
        """First column that a row does not see."""
        return self.mask.end(self._token(row), self.tiles.num_rows, self.kv_len)

    def own(self, row):
        """The column of a row itself."""
        return self.mask.own(self._token(row), self.tiles.num_rows, self.kv_len)

    def begin(self, row):
        """First column that a row sees, where it `has_begin`."""
        if self.mask.has_window:
            return self.mask.begin(self._token(row), self.tiles.num_rows, self.kv_len)
        return self.span.first_seen(self.own(row))

    def first(self):
        """First column of the first tile of K and V.

        Tiles begin at the same columns for all rows of a sequence, or the bits of a row would
        depend on what else is in its tile of rows.
        """
        return self.begin(0) // POSITIONS * POSITIONS if self.has_begin else T.int32(0)

    def last(self, first):
        """First column that no row sees."""
        last = T.min(self.end(self.rows.num_rows - 1), self.span.end)
        return T.max(first, last) if self.has_begin else last

    def hides_some(self, first, first_row, last_row):
        """Whether a row from `first_row` to `last_row` does not see all of the tile at `first`."""
        hides_some = first + POSITIONS > self.mask.shared_end(self.end(first_row))
        if self.has_gap:
            hides_some = T.Or(hides_some, first + POSITIONS > self.span.end)
        if self.has_begin:
            last_begin = self.mask.shared_begin(self.begin(last_row))
            hides_some = T.Or(hides_some, first < last_begin)
        return hides_some

    def num_left(self, first, row):
        """Columns from `first` on that some row up to `row` sees, in any tile."""
        end = self.end(row)
        return (T.min(end, self.span.end) if self.has_gap else end) - first


@dataclass(frozen=True)
class TileView:
    """What some blocks of rows see of a tile of K and V.

    Parameters
    ----------
    bounds : RowBounds
    first : int32 expression
        First column of the tile of K and V.
    block, count : int32 expressions
        First block and their number.
    """

    bounds: RowBounds
    first: Any
    block: Any
    count: Any

    @property
    def block_rows(self) -> int:
        """Rows of a block."""
        return self.bounds.rows.block_rows

    @property
    def first_row(self):
        """First row of the blocks."""
        return self.block * self.block_rows

    @property
    def num_rows(self):
        """Rows of the blocks."""
        return self.count * self.block_rows

    def last_row(self, block):
        """Last row of one of the blocks, counted from the first one."""
        return self.first_row + block * self.block_rows + self.block_rows - 1

    def hides_some(self):
        """Whether one of the rows does not see all of the tile."""
        return self.bounds.hides_some(
            self.first, self.first_row, self.first_row + self.num_rows - 1
        )

    def sees_some(self):
        """Whether one of the rows may see some of the tile."""
        sees_some = self.first < self.bounds.end(self.first_row + self.num_rows - 1)
        if self.bounds.has_begin:
            begin = self.bounds.begin(self.first_row)
            sees_some = T.And(sees_some, self.first + POSITIONS > begin)
        return sees_some

    def num_seen(self, block):
        """Return how many columns of the tile some row up to the end of a block sees.

        On the diagonal no row sees the tile's last columns, and of sinks there are few: the other
        columns are left out.
        """
        left = self.bounds.num_left(self.first, self.last_row(block))
        return T.max(T.min(POSITIONS, left), 0)

    def completes(self, block):
        """Whether a block, whose rows see some of the tile, sees no column behind it."""
        left = self.bounds.num_left(self.first, self.last_row(block))
        return T.And(T.And(left > 0, left <= POSITIONS), self.bounds.span.is_last)

    def visible_to(self, row) -> Callable:
        """``(start, lanes) -> bool vector``: which columns of the tile a row of the blocks sees."""
        bounds, mask, first, row = self.bounds, self.bounds.mask, self.first, self.first_row + row
        limits = [index_temp(bounds.end(row))]
        if mask.has_window:
            limits.append(index_temp(bounds.begin(row)))
        described = mask.row(*limits)
        own = index_temp(bounds.own(row)) if mask.sees is not None else None
        begin = index_temp(bounds.begin(row)) if bounds.has_gap else None

        def visible(start, lanes: int):
            seen = mask.visible(first, start, lanes, described)
            if bounds.has_gap:
                column = ramp(first + start, lanes)
                seen = T.And(seen, column >= broadcast(begin, lanes))
                seen = T.And(seen, column < broadcast(bounds.span.end, lanes))
            if mask.sees is not None:
                seen = T.And(
                    seen, mask.sees(broadcast(own, lanes), ramp(first + start, lanes), lanes)
                )
            return seen

        return visible
