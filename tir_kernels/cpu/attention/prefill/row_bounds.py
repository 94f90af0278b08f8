# SPDX-License-Identifier: Apache-2.0
"""The columns of a span that the rows of a prefill tile see."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from tvm.script import tirx as T

from ....semantics.visibility import CausalMask, Span
from ...simd import broadcast, index_temp, ramp
from .tiling import POSITIONS


@dataclass(frozen=True)
class RowBounds:
    """The columns ``begin_of(row) .. end_of(row) - 1``, some of which the mask may hide.

    Neither bound is less for a later row.

    Parameters
    ----------
    mask : CausalMask
    span : Span
    end_of : callable
        Row of the tile -> first column that it does not see.
    begin_of : callable, optional
        Row of the tile -> first column that it sees; None: column 0.
    """

    mask: CausalMask
    span: Span
    end_of: Callable
    begin_of: Callable | None

    @property
    def has_gap(self) -> bool:
        """Whether some columns before the span were dropped."""
        return self.span.begin is not None

    def hides_some(self, first, first_row, last_row):
        """Whether a row from `first_row` to `last_row` does not see all of the tile at `first`."""
        hides_some = first + POSITIONS > self.mask.shared_end(self.end_of(first_row))
        if self.has_gap:
            hides_some = T.Or(hides_some, first + POSITIONS > self.span.end)
        if self.begin_of is not None:
            last_begin = self.mask.shared_begin(self.begin_of(last_row))
            hides_some = T.Or(hides_some, first < last_begin)
        return hides_some

    def sees_some(self, first, first_row, last_row):
        """Whether a row from `first_row` to `last_row` may see some of the tile at `first`."""
        sees_some = first < index_temp(self.end_of(last_row))
        if self.begin_of is not None:
            begin = index_temp(self.begin_of(first_row))
            sees_some = T.And(sees_some, first + POSITIONS > begin)
        return sees_some

    def num_left(self, first, row):
        """Return how many columns from `first` on some row up to `row` sees, in any tile."""
        end = self.end_of(row)
        return (T.min(end, self.span.end) if self.has_gap else end) - first

    def num_seen(self, first, row):
        """Return how many columns of the tile at `first` some row up to `row` sees.

        On the diagonal no row sees the tile's last columns, and of sinks there are few: the other
        columns are left out.
        """
        return index_temp(T.max(T.min(POSITIONS, self.num_left(first, row)), 0))

    def visible_to(self, row, first) -> Callable:
        """``(start, lanes) -> bool vector``: which columns of the tile at `first` a row sees."""
        bounds = [index_temp(self.end_of(row))]
        if self.mask.has_window:
            bounds.append(index_temp(self.begin_of(row)))
        described = self.mask.row(*bounds)
        begin = index_temp(self.begin_of(row)) if self.has_gap else None

        def visible(start, lanes: int):
            seen = self.mask.visible(first, start, lanes, described)
            if self.has_gap:
                column = ramp(first + start, lanes)
                seen = T.And(seen, column >= broadcast(begin, lanes))
                seen = T.And(seen, column < broadcast(self.span.end, lanes))
            return seen

        return visible
