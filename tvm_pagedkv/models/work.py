# SPDX-License-Identifier: Apache-2.0
"""What a step of a model has to compute and to read, to be held against what the machine can."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from .config import DecoderConfig


class Work:
    """Of all workers of a model together.

    Parameters
    ----------
    config : DecoderConfig
    itemsize : int
        Bytes of a weight, and of an element of K and V.
    """

    def __init__(self, config: DecoderConfig, itemsize: int):
        c, self.itemsize = config, itemsize
        self.windows = [layer.window for layer in c.layers]  # None: a row sees all before it
        rows = (2 * c.num_heads + 2 * c.num_kv_heads) * c.head_dim + 3 * c.intermediate_size
        self.layer_weights = c.num_layers * rows * c.hidden_size
        self.head_weights = c.vocab_size * c.hidden_size
        self.width = c.head_dim * c.num_heads
        self.kv_width = c.head_dim * c.num_kv_heads

    def flops(self, chunks: Iterable[tuple[int, int]], num_logits: int) -> int:
        """Of the products of a step: of linear layers and of attention.

        Parameters
        ----------
        chunks : of (past, rows)
            Of each sequence, the positions before the step and those of it.
        num_logits : int
            Rows whose logits are computed.
        """
        total = 2 * self.head_weights * num_logits
        for past, rows in chunks:
            lengths = np.arange(past + 1, past + rows + 1)
            pairs = sum(self._seen(lengths))
            total += 2 * self.layer_weights * rows + 4 * self.width * pairs
        return total

    def num_bytes(self, positions: int, lengths: Sequence[int]) -> int:
        """To read in a step of a row each: all weights, and K and V.

        Parameters
        ----------
        positions : int
            That a layer without a window reads, those that texts share counted once.
        lengths : sequence of int
            Of the texts. A layer with a window reads the last positions of each.
        """
        rows = sum(
            positions if window is None else seen
            for window, seen in zip(self.windows, self._seen(np.array(lengths)), strict=True)
        )
        weights = self.layer_weights + self.head_weights
        return (weights + 2 * self.kv_width * rows) * self.itemsize

    def _seen(self, lengths: np.ndarray) -> list[int]:
        """Positions that the last rows of texts of these lengths see in each layer, in all."""
        seen = {
            window: int(lengths.sum() if window is None else np.minimum(lengths, window).sum())
            for window in set(self.windows)
        }
        return [seen[window] for window in self.windows]
