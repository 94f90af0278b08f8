# SPDX-License-Identifier: Apache-2.0
"""The columns of a sequence that its one query row sees."""

from __future__ import annotations

from tvm.script import tirx as T

from ...script import inline
from ...semantics.sequence_gap import SequenceGap
from ...semantics.visibility import Span, WindowMask
from ..registers import I32


@T.meta_class
class VisibleColumns:
    """One range of columns, or two where a sequence has dropped positions: the window, the sinks.

    Parameters
    ----------
    a : the kernel's arguments
    sequences : visibility.WholeSequence
        What `lengths` tells.

    Attributes
    ----------
    gap : SequenceGap
    length : int32
        Positions of the sequence, the dropped ones included; longrope depends on it.
    first, end : int32
        The columns ``first .. end - 1`` of a range.
    k_offset : int32
        RoPE position of column 0, if the range reached down to it.
    q_position : int32
        RoPE position of the row.
    """

    def __init__(self, a, sequences):
        self.a, self.sequences = a, sequences
        self.kv_len, self.length = (T.local_scalar(I32) for _ in range(2))
        self.first, self.end = T.local_scalar(I32), T.local_scalar(I32)
        self.k_offset, self.q_position = T.local_scalar(I32), T.local_scalar(I32)
        self.first_position = T.local_scalar(I32)
        self.gap = SequenceGap(sequences)

    @inline
    def begin(self, sequence, num_pages):
        """Load the lengths and positions of a sequence."""
        self.kv_len = self.sequences.kv_len(sequence, num_pages)
        self.first_position = self.a.first_positions[sequence]
        self.length = self.first_position + self.kv_len
        self.q_position = self.a.query_positions[sequence]
        self.gap.begin(sequence)
        if self.sequences.has_gaps:
            self.length -= self.gap.num_dropped

    @inline
    def take(self, i, work):
        """Take what the row sees of range i and of the pages that the block has."""
        span = T.meta_var(self.gap.span(i, self.kv_len, self.first_position))
        self.first = T.max(work.position(work.first), self.first_seen(span))
        self.end = T.min(work.position(work.end), span.end)
        self.k_offset = span.k_offset
        if self.sequences.has_gaps:
            self.q_position = T.min(self.q_position, span.last_position)

    def first_seen(self, span: Span):
        """Return the first column that the row sees."""
        if span.begin is not None:
            return span.first_seen(self.kv_len - 1)
        if self.a.window is None:
            return 0
        mask = WindowMask(1, self.a.window, self.first_position)
        return mask.begin_of_single(self.kv_len, self.q_position)
