# SPDX-License-Identifier: Apache-2.0
"""`Work`: flops and bytes of a model's steps, to compare with the machine's limits."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from .._codecs import codec_of
from ..config import KV_KINDS
from .config import DecoderConfig
from .weights import weights


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
        attention = [layer for layer in c.layers if layer.kind in KV_KINDS]
        states = [layer.recurrent for layer in c.layers if layer.recurrent is not None]
        self.windows = [layer.window for layer in attention]  # None: no window
        self.layer_weights = sum(
            part.size
            for name, weight in weights(c, range(c.num_layers))
            for part in weight.parts
            if weight.is_matrix and name.startswith("layers.")
        )
        self.state_numbers = sum(x.num_heads * x.key_dim * x.value_dim for x in states)
        self.head_weights = c.vocab_size * c.hidden_size
        numbers = self.layer_weights + self.head_weights
        self.weight_bytes = numbers * itemsize if weight_bytes is None else weight_bytes
        self.width = c.head_dim * c.num_heads
        row_bytes, codec = 2 * c.head_dim * itemsize, codec_of(kv_dtype or "")
        if codec is not None:
            row_bytes = sum(
                each.row_bytes(c.head_dim) + each.scale_bytes(c.head_dim, c.head_dim)
                for each in (codec.k, codec.v)
            )
        self.position_bytes = c.num_kv_heads * row_bytes  # of a layer

    def flops(self, chunks: Iterable[tuple[int, int]], num_logits: int) -> int:
        """Return the flops of a step in linear layers, attention and recurrences.

        A token takes each number of a state through a decay, an update and a read: 5 flops.

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
            total += 5 * self.state_numbers * rows
        return total

    def num_bytes(self, positions: int, lengths: Sequence[int]) -> int:
        """Return the bytes that a step with one row per sequence moves.

        Weights, K and V are read; states of float32 are read and written.

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
        state_bytes = 2 * 4 * self.state_numbers * len(lengths)
        return self.weight_bytes + self.position_bytes * rows + state_bytes

    def _seen(self, lengths: np.ndarray) -> list[int]:
        """Return for each layer the positions that the last rows of all sequences see, summed."""
        seen = {
            window: int(lengths.sum() if window is None else np.minimum(lengths, window).sum())
            for window in set(self.windows)
        }
        return [seen[window] for window in self.windows]
