# SPDX-License-Identifier: Apache-2.0
"""The sequences of a random world, and which positions of their texts are held."""

from __future__ import annotations

from typing import Any

import numpy as np

from ... import reference
from ...reference.window import Window, WindowedReferenceCache
from .kept_positions import KeptPositions

MAX_SEQUENCES = 6  # that exist, mostly


class Text:
    """Sequences of the references of a world.

    Attributes
    ----------
    references : list of reference.ReferenceCache
        All have the same sequences.
    mha : WindowedReferenceCache
        The one that knows windows of sequences.
    kept : list of KeptPositions
        Of each layer group.
    importing : dict
        Sequences by their ids that must not be used yet.
    """

    references: list[reference.ReferenceCache]
    mha: WindowedReferenceCache
    kept: list[KeptPositions]
    importing: dict[int, Any]

    @property
    def ids(self) -> list[int]:
        """Sequences that may be used."""
        return list(self.references[0].sequences)

    @property
    def is_crowded(self) -> bool:
        """Whether there are as many sequences as are of interest; the cache takes more."""
        return len(self.ids) + len(self.importing) >= MAX_SEQUENCES

    def length(self, seq_id: int) -> int:
        return self.references[0].length(seq_id)

    def tree(self, seq_id: int) -> list[int]:
        """Parents of the nodes that are not committed."""
        return self.references[0].trees[seq_id]

    def committed_length(self, seq_id: int) -> int:
        return self.references[0].committed_length(seq_id)

    def window(self, seq_id: int) -> Window:
        """Return the window of the sequence, with the number of dropped positions."""
        return self.mha.of.get(seq_id) or Window()

    def is_whole(self, seq_id: int) -> bool:
        """Whether it neither has a window nor has dropped anything."""
        return self.window(seq_id).size == 0 and self.window(seq_id).dropped == 0

    def text_length(self, seq_id: int, length: int) -> int:
        """Positions of the text up to the end of the first `length` that are held."""
        window = self.window(seq_id)
        return length if length <= window.sinks else length + window.dropped

    def text_positions(self, seq_id: int, begin: int, end: int) -> np.ndarray:
        """Return the positions in the text, and in the reference's rows, of held positions."""
        positions, window = np.arange(begin, end), self.window(seq_id)
        return positions + np.where(positions < window.sinks, 0, window.dropped)

    def kept_text(self, seq_id: int, group: int) -> np.ndarray:
        """Positions of the text whose rows a group has."""
        length, kept = self.length(seq_id), self.kept[group]
        if kept.window:
            return np.arange(kept.first[seq_id], self.text_length(seq_id, length))
        return self.text_positions(seq_id, 0, length)

    def first_position(self, seq_id: int, group: int) -> int:
        """First of the held positions from which on a group has all."""
        first, window = self.kept[group].first[seq_id], self.window(seq_id)
        return first if first <= window.sinks else max(first - window.dropped, window.sinks)

    def first(self, seq_id: int) -> int:
        """First position that all layers keep."""
        return max(self.first_position(seq_id, group) for group in range(len(self.kept)))
