# SPDX-License-Identifier: Apache-2.0
"""Decode steps of the same sequences, over boundaries of pages, with changes in between."""

from __future__ import annotations

import pytest

from ...support.cases.caches.cache_cases import PlainPair
from ...support.emulators.python_kernels import make_cache, shuffle, snapshot


@pytest.mark.parametrize("aux_manager", ["merged", "plain"])
def test_the_same_sequences_step_again(aux_manager):
    cache = make_cache(page_size=4, max_total_tokens=256, aux_manager=aux_manager)
    pair = PlainPair(cache)
    shuffle(cache, 5)
    pair.add(0, 1, 2)
    pair.step([0, 1, 2], [5, 9, 3])
    batch = [0, 1, 2]

    def reorder():
        batch.reverse()

    def replace():
        pair.remove(1)
        pair.add(1)

    def fork():
        pair.fork(2, 3)
        batch.append(3)

    for change in (
        lambda: None,
        lambda: pair.pop(0, 3),
        reorder,
        replace,
        fork,
        lambda: cache.sequence_length(0),  # only reads
        lambda: pair.step([1], [2]),
    ):
        change()
        for _ in range(5):
            pair.step(batch, [1] * len(batch))
        lengths = [pair.expected.length(seq_id) for seq_id in batch]
        assert [cache.sequence_length(seq_id) for seq_id in batch] == lengths
        cache.check_integrity()
    pair.check_rows()


def test_a_repeated_step_is_aborted():
    cache = make_cache(page_size=4)
    pair = PlainPair(cache)
    pair.add(0, 1)
    pair.step([0, 1], [3, 2])
    pair.step([0, 1], [1, 1])
    before = snapshot(cache, [0, 1])
    cache.begin_forward([0, 1], [1, 1])
    cache.abort_forward()
    after = snapshot(cache, [0, 1])
    for each in (before, after):  # without what counts steps, and pages that they read
        stats = each["stats"].items()
        each["stats"] = {k: v for k, v in stats if "read" not in k and k != "num_forwards"}
    assert after == before
    cache.check_integrity()
    pair.step([0, 1], [1, 1])
    pair.check_rows()


if __name__ == "__main__":
    import tvm.testing

    tvm.testing.main()
