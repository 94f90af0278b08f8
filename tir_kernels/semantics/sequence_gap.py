# SPDX-License-Identifier: Apache-2.0
"""The positions that a sequence has dropped, in variables of a kernel."""

from __future__ import annotations

from tvm.script import tirx as T

from ..releases import buffer_of
from .visibility import Gap, NoGap, Span, WholeSequence


@T.meta_class
class SequenceGap:
    """The positions that a sequence has dropped, and the spans of columns on both sides of them.

    Parameters
    ----------
    sequences : visibility.WholeSequence

    Attributes
    ----------
    fields : tuple of int32 variables
        Those that hold the gap; none where sequences drop nothing.
    """

    def __init__(self, sequences: WholeSequence):
        self.sequences, self.fields, self.gap = sequences, (), NoGap()
        if sequences.has_gaps:
            self.fields = tuple(T.local_scalar("int32") for _ in range(3))
            self.gap = Gap(*self.fields, sequences.index_temp)

    def begin(self, sequence) -> None:
        """Load the gap of a sequence."""
        if self.fields:
            gap = self.sequences.gap(sequence)
            for field, value in zip(self.fields, (gap.sinks, gap.begin, gap.back), strict=True):
                T.buffer_store(buffer_of(field), value, [0])

    @property
    def num_spans(self):
        """Return the number of spans of the sequence."""
        return self.gap.num_spans

    @property
    def num_dropped(self):
        """Return the number of positions that the sequence has dropped."""
        return self.gap.num_dropped

    def span(self, i, kv_len, k_offset) -> Span:
        """Return a span of the sequence, whose column 0 is at RoPE position `k_offset`."""
        return self.gap.span(i, kv_len, k_offset)
