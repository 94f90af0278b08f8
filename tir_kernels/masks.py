# SPDX-License-Identifier: Apache-2.0
"""What a row may see, and how `length_info` describes a sequence: callables of parse time.

A skeleton asks for lengths, slots and visible columns and knows nothing else about them, so a new
kind of window is a new object here and leaves the skeletons alone.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from tvm.script import tirx as T

from .cpu.arguments import index_array
from .cpu.simd import index_temp


class WholeSequence:
    """Lengths where ``length_info[b]`` is the number of valid slots in the last page of b."""

    # Position -> slot in the sequence; None: the same.
    slot_of: Callable | None = None

    def __init__(self, spec, handle, batch_size):
        self.page_size = spec.page_size
        self.info = index_array(handle, batch_size)

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

    def visible(self, columns, end):
        """Which of a vector of `columns` a row sees whose `end` is given."""
        return columns < end


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

    def visible(self, columns, end, begin):
        """Which of a vector of `columns` a row sees whose `end` and `begin` are given."""
        return T.And(columns >= begin, columns < end)
