# SPDX-License-Identifier: Apache-2.0
"""Layers with a window: exact in any chunking, with pages of their own that follow the window."""

from __future__ import annotations

import numpy as np
import pytest
import tvm
import tvm_ffi
from tvm_ffi import Shape

import tvm_pagedkv as pkv

from ... import reference
from ...support.cases.caches.cache_cases import DIM, MODES, ROPE, CachePair, layer_of
from ...support.emulators.python_kernels import KERNELS, make_cache, shuffle, snapshot
from ...support.worlds.permissive_steps import permissive_step


class Pair(CachePair):
    """Layers with the given windows (0: none)."""

    def __init__(self, windows, mode: str = "none", seed: int = 0, **fields):
        cache = make_cache(
            layers=[layer_of(window) for window in windows],
            rope_mode=MODES[mode],
            **{"max_total_tokens": 256, **fields},
        )
        shuffle(cache, seed)
        dtype = np.dtype("float32")
        expected = reference.ReferenceCache(len(windows), dtype, ROPE, mode, windows)
        super().__init__(cache, expected, seed)


# Chunks of two sequences in one batch; with windows of 1 to 60, shorter and longer than them.
CHUNKINGS = {
    "one by one": [([0, 1], [1, 1])] * 70,
    "chunks": [([0, 1], [13, 2]), ([1, 0], [18, 1]), ([0], [30]), ([1], [31]), ([0, 1], [5, 20])],
    "mixed": [([0], [32]), ([0], [1]), ([1, 0], [1, 31]), ([1], [1]), ([0, 1], [7, 25])],
}


@pytest.mark.parametrize("chunking", CHUNKINGS)
@pytest.mark.parametrize("page_size", [1, 4, 64])
@pytest.mark.parametrize("windows", [(1, 0, 4), (5, 60)], ids=str)
def test_any_chunking(windows, page_size, chunking):
    pair = Pair(windows, page_size=page_size)
    pair.add(0, 1)
    for seq_ids, lengths in CHUNKINGS[chunking]:
        pair.step(seq_ids, lengths)


@pytest.mark.parametrize("mode", MODES)
def test_rotations(mode):
    pair = Pair((0, 6), mode)
    pair.add(0, 1)
    for seq_ids, lengths in CHUNKINGS["mixed"] + [([1, 0], [1, 1])]:
        pair.step(seq_ids, lengths)
    assert pair.cache.first_position(0, 1) > 0  # inline: K is rotated by its own position


def test_a_small_window_over_a_long_sequence_holds_a_few_pages():
    """100 000 tokens; the kernels are replaced, for only the pages matter."""
    nothing = dict.fromkeys(KERNELS, lambda *args: None)
    window, page_size, chunk = 32, 16, 2000
    fields = {"max_total_tokens": 100_000, "prefill_chunk_size": chunk, "max_num_sequences": 2}
    layers = [layer_of(0), layer_of(window), layer_of(window)]
    cache = make_cache(nothing, layers=layers, page_size=page_size, **fields)
    cache.add_sequence(0)
    most = window // page_size + 2
    for _ in range(100_000 // chunk):
        with permissive_step(cache, [0], [chunk]):
            pass
        assert len(cache.page_table(0, 1)) <= most
    assert cache.sequence_length(0) == cache.total_length() == 100_000
    whole, sliding = cache.stats()["groups"]
    assert (whole["num_used_pages"], whole["num_free_pages"]) == (6250, 0)
    assert sliding["num_used_pages"] <= most
    # The pool itself follows the windows and the chunk.
    assert sliding["num_pages"] <= 2 * most + chunk // page_size + 2
    assert cache.num_available_pages() == 0
    cache.check_integrity()

    # Without other layers a sequence may be longer than all pages together.
    cache = make_cache(nothing, layers=layers[1:], page_size=page_size, **fields)
    cache.add_sequence(0)
    for _ in range(200_000 // chunk):
        with permissive_step(cache, [0], [chunk]):
            pass
    assert cache.sequence_length(0) == 200_000
    assert cache.stats()["num_used_pages"] <= most
    cache.check_integrity()


def test_more_sequences_than_the_pool_of_windows_is_made_for():
    """As many pages are available as a step can take, so who counts them never lacks any."""
    nothing = dict.fromkeys(KERNELS, lambda *args: None)
    chunk, max_num_sequences = 8, 2
    cache = make_cache(
        nothing, layers=[layer_of(0), layer_of(8)], page_size=4, max_total_tokens=4000,
        prefill_chunk_size=chunk, max_num_sequences=max_num_sequences,
    )  # fmt: skip
    most = 0
    finished: list[int] = []
    for seq_id in range(20):
        cache.add_sequence(seq_id)
        for _ in range(2):
            while cache.num_available_pages() < chunk // 4 + 1:
                cache.remove_sequence(finished.pop(0))
            with permissive_step(cache, [seq_id], [chunk]):
                pass
        finished.append(seq_id)
        most = max(most, cache.stats()["num_sequences"])
    whole, sliding = cache.stats()["groups"]
    assert most > max_num_sequences
    assert sliding["num_free_pages"] < whole["num_free_pages"]


def test_the_pool_of_windows_serves_every_step():
    """All sequences at once, pages begun, shared and copied: what the pool is sized for."""
    pair = Pair((7,), max_num_sequences=3, prefill_chunk_size=21, max_total_tokens=4096)
    assert pair.cache.stats()["num_pages"] == 3 * 7 + (18 // 4 + 3)  # 22 positions touch 7 pages
    pair.add(0)
    pair.step([0], [21])
    pair.step([0], [20])
    pair.fork(0, 1)
    pair.fork(0, 2)
    for _ in range(20):
        for lengths in ([5, 7, 9], [1, 1, 1], [2, 1, 18], [6, 5, 10]):
            pair.step([2, 0, 1], lengths)


def test_a_full_group_says_which():
    layers = [layer_of(0, num_kv_heads=1), layer_of(8)]
    cache = make_cache(layers=layers, max_total_tokens=32)
    cache.add_sequence(0)
    for length in (32, 1):
        before = snapshot(cache, [0])
        if length == 32:
            with permissive_step(cache, [0], [length]):
                pass
            continue
        with pytest.raises(pkv.CacheFullError, match="needs 1 pages, but 0 of 8 .* group 0"):
            cache.begin_forward([0], [length])
        assert snapshot(cache, [0]) == before
    cache = make_cache(layers=[layer_of(8)], max_total_tokens=24)
    cache.add_sequence(0)
    with pytest.raises(pkv.CacheFullError, match="needs 8 pages, but 6 of 6 are available"):
        cache.begin_forward([0], [32])


def test_pop():
    pair = Pair((0, 6))
    pair.add(0)
    pair.step([0], [32])
    pair.step([0], [28])
    for n in (1, 15):  # always possible
        pair.pop(0, n)
        pair.cache.check_integrity()
    pair.step([0], [3])
    first = pair.cache.first_position(0, 1)
    assert 0 < first == 60 - 5 - 16 - 3
    length = pair.cache.sequence_length(0)
    pair.pop(0, length - (first + 5))
    pair.step([0], [9])
    pair.pop(0, pair.cache.sequence_length(0))
    assert pair.cache.first_position(0, 1) == 0
    pair.step([0], [9])


def test_fork():
    pair = Pair((6, 0))
    pair.add(0)
    pair.step([0], [32])
    pair.step([0], [31])
    first = pair.cache.first_position(0)
    pair.fork(0, 1, first + 5)
    pair.fork(0, 2)
    pair.fork(2, 3, 0)
    pair.step([3], [20])
    pair.step([2, 1], [1, 30])  # each copies its last page
    assert pair.cache.stats()["cow_page_copies"] == 4
    pair.step([0, 1, 2, 3], [1, 1, 1, 1])
    pair.cache.remove_sequence(0)
    pair.cache.check_integrity()


def test_rows_from_outside():
    pair = Pair((0, 6, 6))
    pair.add(0)
    pair.step([0], [32])
    pair.step([0], [30])
    first, length = pair.cache.first_position(0, 1), pair.cache.sequence_length(0)
    for call in (
        lambda: pair.cache.debug_get_kv(0),
        lambda: pair.cache.debug_get_kv(0, first - 1, first),
        lambda: pair.cache.debug_set_kv(0, first - 1, *np.ones((2, 3, 2, 2, DIM), "float32")),
    ):
        with pytest.raises(IndexError, match=r"is gone: layers with a window of 6 keep"):
            call()
    k, v = (x.numpy() for x in pair.cache.debug_get_kv(0, first))
    for layer in range(3):
        rows = pair.expected.kv(0, layer)
        np.testing.assert_array_equal(k[layer], rows[0][first:])
        np.testing.assert_array_equal(v[layer], rows[1][first:])
    pair.fork(0, 1)
    pair.cache.debug_set_kv(1, length - 2, 0 * k[:, -2:], 0 * v[:, -2:])
    np.testing.assert_array_equal(pair.cache.debug_get_kv(0, first)[0].numpy(), k)
    assert (pair.cache.debug_get_kv(1, length - 2)[0].numpy() == 0).all()
    pair.cache.check_integrity()


@pytest.mark.parametrize("mode", ["none", "inline"])
@pytest.mark.parametrize("window", [1, 5, 9])
def test_self_and_cross_attention_merge_to_the_whole(window, mode):
    pair = Pair((window,), mode)
    pair.add(0, 1, 2)
    pair.step([0, 1], [9, 4])
    pair.step([0], [27])
    for seq_ids, lengths in (
        ([1, 2, 0], [min(3, window), min(2, window), 1]),
        ([0, 1], [1, 1]),
        ([2, 0], [window, window]),
        ([1, 0, 2], [2 * window + 1, 1, window + 1]),
    ):
        with pair.cache.forward(seq_ids, lengths):
            pair.attend_in_parts(0, seq_ids, lengths, pair.qkv(sum(lengths)))


def test_what_is_told():
    cache = make_cache(layers=[layer_of(0), layer_of(8), layer_of(3), layer_of(8)])
    groups = cache.stats()["groups"]
    assert [(g["window"], g["num_layers"]) for g in groups] == [(0, 1), (8, 2), (3, 1)]
    layers = cache.description["layers"]
    assert [(x["kind"], x["window"]) for x in layers[:2]] == [("mha", 0), ("mha_sliding", 8)]
    cache.add_sequence(4)
    for length in (32, 1):
        with permissive_step(cache, [4], [length]):
            pass
    assert cache.draw().splitlines()[2:4] == [
        "group 1: 7 of 16 pages in use, 2 cached",
        "  sequence 4 (33): from position 8: 2 3 4 5 6 7 8",
    ]


def test_positional_form():
    """The 6th number of argument 0 is the window of all layers that have one."""
    names = ("prefill_ragged", "prefill", "decode", "prefill_sliding", "decode_sliding")
    kernels = {name: tvm_ffi.convert(KERNELS[name]) for name in KERNELS}
    arguments = [
        Shape([4, 64, 32, 4, 0, 5]), Shape([0, 3]), 4, 2, DIM, DIM, Shape([3, 0, 3]), False, 0,
        1.0, 1e4, None, tvm.runtime.tensor(np.zeros((), "float32")), kernels["transpose_append"],
        None, *(kernels[name] for name in names), [], [], [], [kernels["merge"]],
        kernels["split_rotary"], kernels["copy_single_page"], None, None,
    ]  # fmt: skip
    create = tvm.get_global_func("vm.builtin.paged_attention_kv_cache_create")
    cache = create(*arguments)
    assert [layer["window"] for layer in cache.description["layers"]] == [5, 0, 5]
    for window in (0, -1):
        arguments[0] = Shape([4, 64, 32, 4, 0, window])
        with pytest.raises(ValueError, match="window must be between 1"):
            create(*arguments)


if __name__ == "__main__":
    import tvm.testing

    tvm.testing.main()
