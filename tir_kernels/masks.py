# SPDX-License-Identifier: Apache-2.0
"""What a row may see, and how `length_info` describes a sequence: callables of parse time.

A skeleton asks for lengths, slots and visible columns and knows nothing else about them, so a new
kind of window is a new object here and leaves the skeletons alone.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from tvm.script import tirx as T

from .cpu.simd import broadcast, index_temp, ramp


class WholeSequence:
    """Lengths where ``length_info[b]`` is the number of valid slots in the last page of b."""

    # Position -> slot in the sequence; None: the same.
    slot_of: Callable | None = None

    def __init__(self, spec, length_info):
        self.page_size, self.info = spec.page_size, length_info

    def kv_len(self, sequence, num_pages):
        """Positions that `sequence`, which has `num_pages` pages, holds."""
        length = (num_pages - 1) * self.page_size + self.info[sequence]
        return index_temp(T.if_then_else(num_pages > 0, length, 0))


@dataclass(frozen=True)
class CausalMask:
    """Row r of the `num_rows` of a step sees the columns below ``kv_len - num_rows + r + 1``.

    Parameters
    ----------
    causal : int32 expression; 0 lets every row see every column.
    """

    causal: object

    # Whether rows do not see some first columns either: then there is `begin`.
    has_window = False

    def end(self, row, num_rows, kv_len):
        """First column that `row` does not see; never less for a later row."""
        bound = T.max(T.min(kv_len - num_rows + row + 1, kv_len), 0)
        return T.if_then_else(self.causal != 0, bound, kv_len)

    def shared_end(self, end):
        """All columns before it are seen by a row with this `end` and by later ones."""
        return end

    def row(self, end):
        """What `visible` has to know of the row with this `end`."""
        return end

    def visible(self, first, start: int, lanes: int, row):
        """Which of `lanes` columns from ``first + start`` on the `row` sees."""
        return ramp(first + start, lanes) < broadcast(row, lanes)

    def offsets(self, start, lanes: int):
        """RoPE positions of columns of a tile, relative to its first column's."""
        return ramp(start, lanes)

    def prepare(self, a) -> None:
        """Nothing to prepare for a call."""

    def begin_task(self) -> None:
        """Nothing to make for a task."""

    def begin_sequence(self, sequence, kv_len) -> None:
        """Nothing to know of a sequence."""

    def begin_tile(self, first, rope) -> None:
        """Nothing to know of a tile of columns."""


@dataclass(frozen=True)
class WindowMask(CausalMask):
    """As `CausalMask`, but a row sees the last `window` positions only, its own included.

    Parameters
    ----------
    causal : int32 expression; 0 when the rows of the step follow the columns.
    window : int32 expression
    """

    window: object
    has_window = True

    def begin(self, row, num_rows, kv_len):
        """First column that `row` sees; never less for a later row."""
        own = kv_len + row - T.if_then_else(self.causal != 0, num_rows, 0)
        return T.max(own + 1 - self.window, 0)

    def shared_begin(self, begin):
        """All columns from it on are seen by a row with this `begin` and by earlier ones."""
        return begin

    def row(self, end, begin):
        """What `visible` has to know of the row with these bounds."""
        return end, begin

    def visible(self, first, start: int, lanes: int, row):
        """Which of `lanes` columns from ``first + start`` on the `row` sees."""
        columns, (end, begin) = ramp(first + start, lanes), row
        return T.And(columns >= broadcast(begin, lanes), columns < broadcast(end, lanes))
