# SPDX-License-Identifier: Apache-2.0
"""The needle test finds what a model copies, and nothing where it does not."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

sys.path.append(str(Path(__file__).resolve().parents[2] / "scripts" / "bench"))
from lib.quality.needle import NEEDLE, find_needles, needle_texts

VOCABULARY = 50
LENGTH = 600


class Copier:
    """A model that goes on with what followed the last tokens `reach` tokens back at most."""

    config = SimpleNamespace(vocab_size=VOCABULARY)

    def __init__(self, reach: int):
        self.reach = reach
        self.text: list[int] = []

    def create_cache(self, num_sequences: int, length: int, chunk: int):
        return SimpleNamespace(
            add_sequence=lambda seq_id: self.text.clear(), remove_sequence=lambda seq_id: None
        )

    def logits(self, cache, seq_ids: list[int], tokens: list[list[int]]) -> list[np.ndarray]:
        logits = []
        for token in tokens[0]:
            self.text.append(token)
            logits.append(np.eye(VOCABULARY)[self._next()] * 20)
        return [np.array(logits)]

    def _next(self) -> int:
        """What followed the longest match of the text's end."""
        best, length = 0, 0
        for end in range(max(0, len(self.text) - 1 - self.reach), len(self.text) - 1):
            n = 0
            while n <= end and self.text[end - n] == self.text[-1 - n]:
                n += 1
            if n > length:
                best, length = self.text[end + 1], n
        return best


@pytest.mark.parametrize("distance", [40, 300])
def test_texts_have_one_needle_twice(distance):
    for text in needle_texts(5, LENGTH, distance, VOCABULARY, seed=1):
        assert text.shape == (LENGTH,)
        assert 0 <= text.min() <= text.max() < VOCABULARY
        needle = text[-NEEDLE - 1 :]
        np.testing.assert_array_equal(text[-NEEDLE - 1 - distance : -distance], needle)
        assert np.sum(text == needle[0]) == 2


def test_no_token_of_a_large_vocabulary_stands_twice_but_the_needle():
    for text in needle_texts(3, LENGTH, 64, 4 * LENGTH, seed=2):
        tokens, times = np.unique(text, return_counts=True)
        np.testing.assert_array_equal(tokens[times > 1], np.sort(text[-NEEDLE - 1 :]))
        assert times.max() == 2


def test_a_copier_finds_every_needle_that_it_can_see():
    models = {"far": Copier(LENGTH), "near": Copier(100)}
    lines = []
    results = find_needles(models, 4, LENGTH, chunk=64, seed=0, progress=lines.append)
    assert len(lines) == 4 * len(results) + 1 and lines[-1] == ""
    assert [(r["codec"], r["distance"], r["found"]) for r in results] == [
        ("far", 256, 1.0),
        ("near", 256, 0.0),
    ]
    assert results[0]["probability"] > 0.99 > 0.5 > results[1]["probability"]


def test_short_texts_are_refused():
    with pytest.raises(ValueError, match="265 tokens or more"):
        find_needles({"far": Copier(100)}, 1, 200, chunk=64, seed=0)


if __name__ == "__main__":
    import tvm.testing

    tvm.testing.main()
