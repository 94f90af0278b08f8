# SPDX-License-Identifier: Apache-2.0
"""Random operations with windows on some sequences, and failing calls that change nothing."""

from __future__ import annotations

import numpy as np
import pytest

from .python_kernels import snapshot
from .reference_window import WindowedReferenceCache
from .test_cache_random import WINDOWS, Driver, KeptPositions


class WindowDriver(Driver):
    """As `Driver`; some sequences get a window when they are made, forked, or later."""

    reference_class = WindowedReferenceCache
    fields = {"sliding_window": True}

    def text_length(self, seq_id: int, length: int) -> int:
        return self.expected.text_length(seq_id, length)

    def text_positions(self, seq_id: int, begin: int, end: int) -> np.ndarray:
        positions = [self.expected.text_position(seq_id, i) for i in range(begin, end)]
        return np.array(positions, int)

    def num_pages(self, kept: KeptPositions, seq_id: int) -> int:
        length = self.expected.length(seq_id)
        if kept.window:
            return kept.num_pages(seq_id, self.text_length(seq_id, length))
        return len(set(self.text_positions(seq_id, 0, length) // self.page_size))

    def first_position(self, kept: KeptPositions, seq_id: int) -> int:
        if not kept.window:
            return 0
        window, first = self.expected.of[seq_id], kept.first[seq_id]
        return first if first <= window.sinks else max(first - window.dropped, window.sinks)

    def add(self) -> None:
        super().add()
        if self.ids and self.rng.random() < 0.5:
            self.enable()

    def fork(self) -> None:
        before = set(self.ids)
        super().fork()
        for child in set(self.ids) - before:
            self.counts["gap"] = self.counts.get("gap", 0) + (self.expected.of[child].dropped > 0)
            if self.rng.random() < 0.3:
                self.enable(child)

    def enable(self, seq_id: int | None = None) -> None:
        if not self.ids:
            return
        seq_id = self.pick() if seq_id is None else seq_id
        window = self.expected.of[seq_id]
        size = int(self.rng.integers(1, 14))
        sinks = window.sinks if window.dropped else int(self.rng.integers(0, size))
        before = snapshot(self.cache, self.ids)
        if window.size or size <= sinks:
            with pytest.raises(ValueError, match="already|fewer than"):
                self.cache.enable_sliding_window(seq_id, size, sinks)
            assert snapshot(self.cache, self.ids) == before
            return
        if window.dropped:
            with pytest.raises(ValueError, match="as many"):
                self.cache.enable_sliding_window(seq_id, sinks + 9, sinks + 1)
            assert snapshot(self.cache, self.ids) == before
        self.cache.enable_sliding_window(seq_id, size, sinks)
        self.expected.enable_window(seq_id, size, sinks)

    def slide(self, batch: list[int]) -> None:
        super().slide(batch)
        before = sum(window.dropped for window in self.expected.of.values())
        self.expected.end_step(batch)
        after = sum(window.dropped for window in self.expected.of.values())
        self.counts["dropped"] = self.counts.get("dropped", 0) + after - before

    def take_back(self, batch: list[int]) -> None:
        """What has slid does not come back, so the step is carried out."""
        for layer in range(self.num_layers):
            self.attend(layer, batch, [1] * len(batch))
        self.cache.end_forward()
        self.slide(batch)

    def check_counters(self) -> None:
        super().check_counters()
        for seq_id in self.ids:
            window = self.expected.of[seq_id]
            got = self.cache.sequence_window(seq_id)
            assert got == (window.size, window.sinks, window.dropped)
        stats = self.cache.stats()
        windows = list(self.expected.of.values())
        assert stats["num_windowed_sequences"] == sum(window.size > 0 for window in windows)
        assert stats["num_dropped_tokens"] == sum(window.dropped for window in windows)


@pytest.mark.parametrize("windows", ["global", "mixed"])
@pytest.mark.parametrize("page_size", [1, 4, 16])
@pytest.mark.parametrize("seed", range(3))
def test_random_operations(seed, page_size, windows):
    driver = WindowDriver(seed, page_size, "merged" if seed else "plain", WINDOWS[windows])
    driver.run()
    print(driver.counts, driver.cache.stats()["cow_page_copies"])
    assert driver.counts["step"] > 100
    assert driver.counts["dropped"] > 100
    assert driver.counts["gap"] > 0
    assert page_size == 1 or driver.cache.stats()["cow_page_copies"] > 0
