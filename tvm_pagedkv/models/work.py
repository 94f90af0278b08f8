# SPDX-License-Identifier: Apache-2.0
"""`Work`: flops and bytes of a model's steps, to compare with the machine's limits."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from .._codecs import codec_of
from .config import DecoderConfig


class Work:
    """Counts flops and bytes of a model's steps, for all workers together.

    Parameters
    ----------
    config : DecoderConfig
    itemsize : int
        Bytes per weight, and per element of K and V unless a codec quantizes them.
    kv_dtype : str, optional
        The codec; None or a type of numbers: there is none.
    weight_bytes : int, optional
        Bytes of all matrices that multiply rows; None: `itemsize` for each weight.
    """

    def __init__(
        self,
        config: DecoderConfig,
        itemsize: int,
        kv_dtype: str | None = None,
        weight_bytes: int | None = None,
    ):
        c = config
        self.windows = [layer.window for layer in c.layers]  # None: no window
        rows = (2 * c.num_heads + 2 * c.num_kv_heads) * c.head_dim + 3 * c.intermediate_size
        self.layer_weights = c.num_layers * rows * c.hidden_size
        self.head_weights = c.vocab_size * c.hidden_size
        weights = self.layer_weights + self.head_weights
        self.weight_bytes = weights * itemsize if weight_bytes is None else weight_bytes
        self.width = c.head_dim * c.num_heads
        row_bytes, codec = 2 * c.head_dim * itemsize, codec_of(kv_dtype or "")
        if codec is not None:
            row_bytes = sum(
                each.row_bytes(c.head_dim) + each.scale_bytes(c.head_dim, c.head_dim)
                for each in (codec.k, codec.v)
            )
        self.position_bytes = c.num_kv_heads * row_bytes  # of a layer

    def flops(self, chunks: Iterable[tuple[int, int]], num_logits: int) -> int:
        """Return the flops of a step in linear layers and attention.

        Parameters
        ----------
        chunks : iterable of (past, rows)
            For each sequence, its positions before the step, and the rows it appends.
        num_logits : int
            Number of rows whose logits are computed.
        """
        total = 2 * self.head_weights * num_logits
        for past, rows in chunks:
            lengths = np.arange(past + 1, past + rows + 1)
            pairs = sum(self._seen(lengths))
            total += 2 * self.layer_weights * rows + 4 * self.width * pairs
        return total

    def num_bytes(self, positions: int, lengths: Sequence[int]) -> int:
        """Return the bytes that a step with one row per sequence reads: weights, K and V.

        Parameters
        ----------
        positions : int
            Positions that a layer without a window reads; shared ones count once.
        lengths : sequence of int
            Lengths of the sequences. A layer with a window reads the last positions of each.
        """
        rows = sum(
            positions if window is None else seen
            for window, seen in zip(self.windows, self._seen(np.array(lengths)), strict=True)
        )
        return self.weight_bytes + self.position_bytes * rows

    def _seen(self, lengths: np.ndarray) -> list[int]:
        """Return for each layer the positions that the last rows of all sequences see, summed."""
        seen = {
            window: int(lengths.sum() if window is None else np.minimum(lengths, window).sum())
            for window in set(self.windows)
        }
        return [seen[window] for window in self.windows]
