# SPDX-License-Identifier: Apache-2.0
"""`Work`: flops and bytes of a model's steps, to compare with the machine's limits."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from tir_kernels.codec import codec_of
from tvm_pagedkv.config import ITEMSIZE

from ..config.decoder_config import DecoderConfig
from .decoder_weights import weights


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
    expert_bytes : int, optional
        Bytes of those that belong to experts; None: `itemsize` for each weight.
    budgets : iterable of (int, int)
        Layers of the model whose decode steps attend within a budget, and this budget.
    page_size : int
        Positions of a page, of which such a layer reads the bounds.
    state_dtype : str
        Type of the states of recurrent layers.
    """

    def __init__(
        self,
        config: DecoderConfig,
        itemsize: int,
        kv_dtype: str | None = None,
        weight_bytes: int | None = None,
        expert_bytes: int | None = None,
        budgets: Iterable[tuple[int, int]] = (),
        page_size: int = 16,
        state_dtype: str = "float32",
    ):
        c = config
        self._experts = next((part.routed for part in c.parts if part.routed), None)
        of_layers = [(i, x.attention) for i, x in enumerate(c.layers) if x.attention is not None]
        ids, attention = [i for i, _ in of_layers], [each for _, each in of_layers]
        states = [layer.recurrent for layer in c.cache_layers if layer.recurrent is not None]
        self.windows = [(each.pages.kind, each.most_positions) for each in attention]
        # Within a budget, a decode step reads some pages, and the bounds of all, two rows of K.
        self.decode_windows, self.bounds_bytes = list(self.windows), 0.0
        for index, budget in budgets:
            self.decode_windows[ids.index(index)] = "mha", budget
            spec = c.layers[index].cache_layers[0]
            width = (spec.num_kv_heads or c.num_kv_heads) * (spec.qk_head_dim or c.head_dim)
            self.bounds_bytes += 2 * width * itemsize / page_size
        matrices = [
            (sum(part.size for part in weight.parts), weight.experts > 1)
            for name, weight in weights(c, range(c.num_layers))
            if weight.is_matrix and name.startswith("layers.")
        ]
        self.layer_weights = sum(size for size, _ in matrices)
        self.expert_weights = sum(size for size, is_of_experts in matrices if is_of_experts)
        # Numbers of layers that a row multiplies with.
        self.row_weights = (
            self.layer_weights
            - self.expert_weights
            + round(self.expert_weights * self._share_of_experts(1))
        )
        self.state_numbers = sum(x.num_heads * x.key_dim * x.value_dim for x in states)
        self.state_bytes = self.state_numbers * ITEMSIZE[state_dtype]
        self.head_weights = c.vocab_size * c.hidden_size
        numbers = self.layer_weights + self.head_weights
        self.weight_bytes = numbers * itemsize if weight_bytes is None else weight_bytes
        if expert_bytes is None:
            expert_bytes = self.expert_weights * itemsize
        self.expert_bytes = expert_bytes
        # A pair of a row and a position multiplies rows of K and of V with it.
        self.widths = [each.product_width for each in attention]
        # A pair of a row and a position multiplies all index heads with a key.
        indexes = [each.index for each in attention if each.index and each.index.chooses]
        self.index_width = sum(index.num_heads * index.dim for index in indexes)
        self.index_bytes = sum(index.dim for index in indexes) * itemsize
        codec = codec_of(kv_dtype or "")
        self.position_bytes = [each.position_bytes(itemsize, codec) for each in attention]

    def flops(self, chunks: Iterable[tuple[int, int]], num_logits: int) -> int:
        """Return the flops of a step in linear layers, attention, indexers and recurrences.

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
            seen = _seen(lengths, self.windows)
            products = sum(width * n for width, n in zip(self.widths, seen, strict=True))
            total += 2 * self.row_weights * rows + 4 * products
            total += 2 * self.index_width * int(lengths.sum())
            total += 5 * self.state_numbers * rows
        return total

    def num_bytes(self, positions: int, lengths: Sequence[int]) -> int:
        """Return the bytes that a step with one row per sequence moves.

        Weights, K and V are read; states are read and written. Of experts as many are
        counted as rows can choose at most.

        Parameters
        ----------
        positions : int
            Positions that a layer without a window reads; shared ones count once.
        lengths : sequence of int
            Lengths of the sequences. A layer with a window reads the last positions of each.
        """
        seen = _seen(np.array(lengths), self.decode_windows)
        kv_bytes = sum(
            num_bytes * (positions if window is None else count)
            for (_, window), count, num_bytes in zip(
                self.decode_windows, seen, self.position_bytes, strict=True
            )
        )
        kv_bytes += round(self.bounds_bytes * positions)
        state_bytes = 2 * self.state_bytes * len(lengths)
        weight_bytes = self.weight_bytes - self.expert_bytes
        weight_bytes += int(self.expert_bytes * self._share_of_experts(len(lengths)))
        return weight_bytes + kv_bytes + self.index_bytes * positions + state_bytes

    def _share_of_experts(self, rows: int) -> float:
        """Return the largest share of a layer's experts that so many rows can choose."""
        if self._experts is None:
            return 0.0
        return min(1.0, rows * self._experts.num_chosen / self._experts.num_experts)


def _seen(lengths: np.ndarray, windows: Sequence[tuple[str, int | None]]) -> list[int]:
    """Return for each layer the positions that the last rows of all sequences see, summed."""
    seen = {each: _num_seen(lengths, *each) for each in set(windows)}
    return [seen[each] for each in windows]


def _num_seen(lengths: np.ndarray, kind: str, window: int | None) -> int:
    """Return how many positions the last rows of sequences see in a layer, summed."""
    if window is None:
        return int(lengths.sum())
    if kind == "mha_chunked":
        return int(((lengths - 1) % window + 1).sum())
    return int(np.minimum(lengths, window).sum())
