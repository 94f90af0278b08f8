# SPDX-License-Identifier: Apache-2.0
"""What a step of a model has to compute and to read, to be held against what the machine can."""

from __future__ import annotations

from collections.abc import Iterable

from .config import LlamaConfig


class Work:
    """Of all workers of a model together.

    Parameters
    ----------
    config : LlamaConfig
    itemsize : int
        Bytes of a weight, and of an element of K and V.
    """

    def __init__(self, config: LlamaConfig, itemsize: int):
        c, self.itemsize = config, itemsize
        self.window = c.sliding_window
        rows = (2 * c.num_heads + 2 * c.num_kv_heads) * c.head_dim + 3 * c.intermediate_size
        self.layer_weights = c.num_layers * rows * c.hidden_size
        self.head_weights = c.vocab_size * c.hidden_size
        self.width = c.num_layers * c.head_dim * c.num_heads
        self.kv_width = c.num_layers * c.head_dim * c.num_kv_heads

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
            pairs = sum(self.seen(past + i + 1) for i in range(rows))
            total += 2 * self.layer_weights * rows + 4 * self.width * pairs
        return total

    def num_bytes(self, positions: int) -> int:
        """To read in a step: all weights, and K and V of so many positions."""
        weights = self.layer_weights + self.head_weights
        return (weights + 2 * self.kv_width * positions) * self.itemsize

    def seen(self, length: int) -> int:
        """Positions that the last one of a sequence sees."""
        return length if self.window is None else min(length, self.window)
