# SPDX-License-Identifier: Apache-2.0
"""A cache whose sequences may have windows, and its reference, driven alike."""

from __future__ import annotations

import numpy as np

from ....reference.window import WindowedReferenceCache
from ...emulators.python_kernels import make_cache, poison, shuffle
from .cache_cases import MODES, ROPE, CachePair, layer_of

# Of two sequences, the first one with a window: shorter and longer chunks than it.
CHUNKINGS = {
    "one by one": [([0, 1], [1, 1])] * 60,
    "chunks": [([0, 1], [13, 2]), ([1, 0], [18, 1]), ([0], [30]), ([1], [3]), ([0, 1], [5, 20])],
    "mixed": [([0], [32]), ([0], [1]), ([1, 0], [1, 31]), ([1], [1]), ([0, 1], [7, 25])],
}


class WindowPair(CachePair):
    """`layers` has their windows; 0: none, where those of the sequences count.

    `mode` is one for all layers, or one for each.
    `includes_self` is the cache's ``sliding_window_includes_self``.
    """

    def __init__(
        self, layers=(0,), mode: str | tuple = "inline", seed: int = 0, kernels=None, cache=None,
        includes_self: bool | None = None, **fields,
    ):  # fmt: skip
        modes = [mode] * len(layers) if isinstance(mode, str) else mode
        cache = cache or make_cache(
            kernels, rope_mode=0, layers=[
                layer_of(window, rope_mode=MODES[each])
                for window, each in zip(layers, modes, strict=True)
            ],
            sliding_window=True, sliding_window_includes_self=includes_self,
            **{"max_total_tokens": 512, **fields},
        )  # fmt: skip
        shuffle(cache, seed)
        expected = WindowedReferenceCache(
            len(layers), np.dtype("float32"), ROPE, mode, layers, includes_self=includes_self
        )
        super().__init__(cache, expected, seed)
        self.row = int(expected.includes_self)  # by this a window is larger than what is held

    def add(self, seq_id: int, window: int = 0, sinks: int = 0) -> None:
        super().add(seq_id)
        if window:
            self.enable(seq_id, window, sinks)

    def enable(self, seq_id: int, window: int, sinks: int) -> None:
        self.cache.enable_sliding_window(seq_id, window, sinks)
        self.expected.enable_window(seq_id, window, sinks)

    def slide(self, window: int, sinks: int, num_decodes: int) -> None:
        """Let sequence 0 outgrow its window, beside one without; then pop, extend and fork it."""
        self.add(0, window + self.row, sinks)
        self.add(1)
        for seq_ids, lengths in CHUNKINGS["mixed"] + [([0, 1], [1, 1])] * num_decodes:
            self.step(seq_ids, lengths)
        self.pop(0, 5)
        self.step([0], [9])
        self.fork(0, 2)
        self.step([1, 2, 0], [1, 1, 1])
        assert self.cache.sequence_length(0) == window

    def pop(self, seq_id: int, n: int) -> None:
        super().pop(seq_id, n)
        self.check()

    def step(self, seq_ids: list[int], lengths: list[int]) -> None:
        positions = [
            self.first_position(i) + np.arange(n) for i, n in zip(seq_ids, lengths, strict=True)
        ]
        with self.cache.forward(seq_ids, lengths):
            np.testing.assert_array_equal(
                self.cache.query_positions().numpy(), np.concatenate(positions)
            )
            for layer in range(self.expected.num_layers):
                self.attend(layer, seq_ids, lengths)
            self.cache.check_integrity()
        self.expected.end_step(seq_ids)
        self.check()

    def first_position(self, seq_id: int) -> int:
        """Return the position of the next row, as models and rotations count it."""
        length = self.expected.length(seq_id)
        if "inline" in self.expected.modes:
            return length
        return self.expected.text_position(seq_id, length)

    def check(self) -> None:
        self.cache.check_integrity()
        for seq_id in self.expected.sequences:
            window, held = self.expected.of[seq_id], self.expected.length(seq_id)
            assert self.cache.sequence_length(seq_id) == held
            got = self.cache.sequence_window(seq_id)
            sinks = window.sinks if window.size or window.dropped else 0
            assert got == (window.size, sinks, window.dropped)
        poison(self.cache)
