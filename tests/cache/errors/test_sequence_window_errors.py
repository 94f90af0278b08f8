# SPDX-License-Identifier: Apache-2.0
"""Calls that a sequence with a window refuses; a refused call changes nothing."""

from __future__ import annotations

import numpy as np
import pytest
import tvm

import tvm_pagedkv as pkv

from ...support.cases.caches.cache_cases import DIM
from ...support.cases.caches.checkpoint_cases import call, export, restore
from ...support.cases.caches.sequence_window_cases import WindowPair
from ...support.emulators.python_kernels import (
    KERNELS,
    LAYER,
    MLA_KERNELS,
    MLA_LAYER,
    make_cache,
    snapshot,
)
from ...support.emulators.python_tree_kernels import KERNELS_WITH_TREES
from ...support.worlds.permissive_steps import permissive_step


def test_refusals_change_nothing():
    pair = WindowPair()
    pair.add(0, 8, 2)
    pair.add(1)
    pair.step([0, 1], [12, 5])
    cache = pair.cache
    calls = {
        "no sequence 9": lambda: cache.enable_sliding_window(9, 8, 2),
        "has a window of 8 with 2 sinks already": lambda: cache.enable_sliding_window(0, 8, 2),
        "window .* between 1 and .*, got 0": lambda: cache.enable_sliding_window(1, 0, 0),
        "window .* got -3": lambda: cache.enable_sliding_window(1, -3, -4),
        "sinks .* got -1": lambda: cache.enable_sliding_window(1, 8, -1),
        "fewer than its window .8., got 8": lambda: cache.enable_sliding_window(1, 8, 8),
        "window .* got 2147483648": lambda: cache.enable_sliding_window(1, 2**31, 0),
    }
    for text, wrong in calls.items():
        before = snapshot(cache, [0, 1])
        with pytest.raises(KeyError if "no seq" in text else ValueError, match=text):
            wrong()
        assert snapshot(cache, [0, 1]) == before
    with (
        permissive_step(cache, [0], [1]),
        pytest.raises(ValueError, match="not possible within a step"),
    ):
        cache.enable_sliding_window(1, 8, 2)


def test_caches_without_windows_of_sequences():
    enable = {
        "made without sliding_window": make_cache(),
        "not possible with MLA layers": make_cache(
            [{**KERNELS, **MLA_KERNELS}], layers=[LAYER, MLA_LAYER], sliding_window=True
        ),
    }
    for text, cache in enable.items():
        cache.add_sequence(0)
        with pytest.raises(ValueError, match=text):
            cache.enable_sliding_window(0, 8, 2)
        assert cache.sequence_window(0) == (0, 0, 0)


def test_trees_and_windows_exclude_each_other():
    """In either order, also for a fork that has the gap alone; other sequences may have trees."""
    pair = WindowPair(kernels=KERNELS_WITH_TREES)
    pair.add(0, 8, 2)
    pair.add(1)
    pair.step([0, 1], [20, 3])
    pair.fork(0, 2, 5)
    cache, some = pair.cache, pair.qkv(3)
    before = snapshot(cache, [0, 1, 2])
    for seq_ids, lengths, parents in (
        ([0], [1], [-1]), ([2], [1], [-1]), ([1, 0], [2, 1], [-1, -1, -1]), ([2], [2], [-1, -1]),
    ):  # fmt: skip
        with pytest.raises(ValueError, match="it cannot be in a step with token trees"):
            cache.begin_forward(seq_ids, lengths, parents)
    assert snapshot(cache, [0, 1, 2]) == before
    with cache.forward([1], [3], [-1, 0, 0]):
        cache.attention(0, some)
    before = snapshot(cache, [0, 1, 2])
    with pytest.raises(ValueError, match="3 token tree nodes that are not committed"):
        cache.enable_sliding_window(1, 8, 2)
    assert snapshot(cache, [0, 1, 2]) == before
    cache.commit_tree([1, 0], [-1, -1])
    pair.enable(1, 8, 2)
    pair.step([1, 0, 2], [9, 4, 1])


def test_there_are_no_checkpoints():
    """Sequences with a window or a gap have none; others in the same cache do."""
    pair = WindowPair()
    pair.add(0, 8, 2)
    pair.add(1)
    pair.add(3, 8, 2)
    pair.step([0, 1], [20, 5])
    pair.fork(0, 2, 5)
    before = snapshot(pair.cache, range(4))
    out = np.zeros((1, 2, 2, 2, 4, DIM), "float32")
    for seq_id, text in ((0, "has a sliding window"), (2, "has dropped"), (3, "a sliding window")):
        with pytest.raises(ValueError, match=text):
            call("get_checkpoint_metadata", pair.cache, seq_id)
        with pytest.raises(ValueError, match=text):
            call("export_page_group", pair.cache, seq_id, 0, tvm.runtime.tensor(out))
    checkpoint = export(pair.cache, 1)
    with pytest.raises(ValueError, match="has a sliding window, so it cannot be imported"):
        restore(pair.cache, 3, checkpoint)
    assert snapshot(pair.cache, range(4)) == before
    restore(pair.cache, 4, checkpoint)
    pair.expected.fork_sequence(1, 4)
    pair.enable(4, 4, 1)
    pair.step([4, 0, 3], [3, 1, 9])


def test_a_full_cache():
    """A step that does not fit leaves the window where it was."""
    pair = WindowPair(max_total_tokens=32)
    pair.add(0, 8, 2)
    pair.add(1)
    pair.step([0], [20])
    pair.step([1], [17])  # 3 and 5 of 8 pages
    before = snapshot(pair.cache, [0, 1])
    with pytest.raises(pkv.CacheFullError, match="needs 2 pages, but 0 of 8"):
        pair.cache.begin_forward([0, 1], [1, 4])
    assert snapshot(pair.cache, [0, 1]) == before
    pair.remove(1)
    pair.step([0], [20])


if __name__ == "__main__":
    import tvm.testing

    tvm.testing.main()
