# SPDX-License-Identifier: Apache-2.0
"""Windows of sequences: exact in any chunking, with pages that follow the window."""

from __future__ import annotations

import numpy as np
import pytest
import tvm
import tvm_ffi

import tvm_pagedkv as pkv

from . import reference
from .checkpoint_cases import call, export, restore
from .python_kernels import (
    KERNELS,
    LAYER,
    MLA_KERNELS,
    MLA_LAYER,
    make_cache,
    poison,
    shuffle,
    snapshot,
)
from .python_tree_kernels import KERNELS_WITH_TREES
from .reference_window import WindowedReferenceCache

HEADS, DIM = 4 + 2 * 2, 8
ROPE = reference.Rope(rotary_dim=DIM)
MODES = {"none": 0, "normal": 1, "inline": 2}


class Pair:
    """A cache and its reference, driven alike.

    Parameters
    ----------
    layers : windows of the layers; 0: none, where those of the sequences count.
    """

    def __init__(self, layers=(0,), mode: str = "inline", seed: int = 0, kernels=None, **fields):
        self.layers = layers
        sliding = [{**LAYER, "kind": "mha_sliding", "window": w} if w else LAYER for w in layers]
        self.cache = make_cache(
            kernels, layers=sliding, rope_mode=MODES[mode], sliding_window=True,
            **{"max_total_tokens": 512, **fields},
        )  # fmt: skip
        shuffle(self.cache, seed)
        self.expected = WindowedReferenceCache(len(layers), np.dtype("float32"), ROPE, mode, layers)
        self.rng = np.random.default_rng(seed)

    def add(self, seq_id: int, window: int = 0, sinks: int = 0) -> None:
        self.cache.add_sequence(seq_id)
        self.expected.add_sequence(seq_id)
        if window:
            self.enable(seq_id, window, sinks)

    def enable(self, seq_id: int, window: int, sinks: int) -> None:
        self.cache.enable_sliding_window(seq_id, window, sinks)
        self.expected.enable_window(seq_id, window, sinks)

    def fork(self, parent: int, child: int, position: int = -1) -> None:
        self.cache.fork_sequence(parent, child, position)
        self.expected.fork_sequence(parent, child, position)

    def pop(self, seq_id: int, n: int) -> None:
        self.cache.pop_n(seq_id, n)
        self.expected.pop_n(seq_id, n)
        self.check()

    def remove(self, seq_id: int) -> None:
        self.cache.remove_sequence(seq_id)
        self.expected.remove_sequence(seq_id)

    def qkv(self, lengths) -> np.ndarray:
        return self.rng.standard_normal((sum(lengths), HEADS, DIM)).astype("float32")

    def step(self, seq_ids: list[int], lengths: list[int]) -> None:
        positions = [
            self.expected.length(i) + np.arange(n) for i, n in zip(seq_ids, lengths, strict=True)
        ]
        with self.cache.forward(seq_ids, lengths):
            np.testing.assert_array_equal(
                self.cache.query_positions().numpy(), np.concatenate(positions)
            )
            for layer in range(len(self.layers)):
                qkv = self.qkv(lengths)
                out = self.cache.attention(layer, qkv).numpy()
                o, _ = self.expected.attention(layer, seq_ids, lengths, qkv, 2, DIM**-0.5)
                reference.assert_close(out, o, "float32", f"layer {layer} of {seq_ids} {lengths}")
            self.cache.check_integrity()
        self.expected.end_step(seq_ids)
        self.check()

    def check(self) -> None:
        self.cache.check_integrity()
        for seq_id in self.expected.sequences:
            window, held = self.expected.of[seq_id], self.expected.length(seq_id)
            assert self.cache.sequence_length(seq_id) == held
            got = self.cache.sequence_window(seq_id)
            sinks = window.sinks if window.size or window.dropped else 0
            assert got == (window.size, sinks, window.dropped)
        poison(self.cache)

    def num_pages(self, seq_id: int, group: int = 0) -> int:
        return len(self.cache.page_table(seq_id, group))


# Of two sequences, the first one with a window: shorter and longer chunks than it.
CHUNKINGS = {
    "one by one": [([0, 1], [1, 1])] * 60,
    "chunks": [([0, 1], [13, 2]), ([1, 0], [18, 1]), ([0], [30]), ([1], [3]), ([0, 1], [5, 20])],
    "mixed": [([0], [32]), ([0], [1]), ([1, 0], [1, 31]), ([1], [1]), ([0, 1], [7, 25])],
}


@pytest.mark.parametrize("mode", ["none", "inline"])
@pytest.mark.parametrize("chunking", CHUNKINGS)
@pytest.mark.parametrize("page_size", [1, 4, 32])
@pytest.mark.parametrize("window, sinks", [(1, 0), (2, 1), (8, 2), (20, 5), (33, 32)])
def test_any_chunking(window, sinks, page_size, chunking, mode):
    pair = Pair(mode=mode, page_size=page_size)
    pair.add(0, window, sinks)
    pair.add(1)
    most = -(-sinks // page_size) + -(-(window - sinks) // page_size) + 1
    for seq_ids, lengths in CHUNKINGS[chunking]:
        pair.step(seq_ids, lengths)
        assert pair.num_pages(0) <= most


@pytest.mark.parametrize("seed", range(3))
def test_the_chunking_does_not_matter(seed):
    """The same rows give the same results, whatever they were cut into."""
    rng = np.random.default_rng(seed)
    qkv = rng.standard_normal((70, HEADS, DIM)).astype("float32")
    results = []
    for cuts in ([1] * 70, [32, 32, 6], [5, 20, 1, 1, 30, 13]):
        cache = make_cache(num_layers=1, rope_mode=2, sliding_window=True)
        cache.add_sequence(0)
        cache.enable_sliding_window(0, 11, 3)
        rows = []
        for part in np.split(qkv, np.cumsum(cuts)[:-1]):
            with cache.forward([0], [len(part)]):
                rows.append(cache.attention(0, part).numpy())
        results.append(np.concatenate(rows))
    for other in results[1:]:
        reference.assert_close(other, results[0], "float32")


@pytest.mark.parametrize("window, sinks", [(8, 2), (16, 0), (30, 9)])
def test_beside_layers_with_windows(window, sinks):
    """Layers with a window of their own follow that one alone."""
    for layers in ((0, 6), (6,), (0, 60, 12)):
        pair = Pair(layers)
        pair.add(0, window, sinks)
        pair.add(1)
        for seq_ids, lengths in CHUNKINGS["mixed"] + [([0, 1], [1, 1])] * 8:
            pair.step(seq_ids, lengths)
        pair.pop(0, 5)
        pair.step([0], [9])
        pair.fork(0, 2)
        pair.step([1, 2, 0], [1, 1, 1])
        assert pair.cache.sequence_length(0) == window


def test_a_long_text_holds_a_few_pages():
    """200 000 tokens; the kernels are replaced, for only the pages matter."""
    nothing = dict.fromkeys(KERNELS, lambda *args: None)
    cache = make_cache(
        nothing, num_layers=1, sliding_window=True, page_size=16, max_total_tokens=2560,
        prefill_chunk_size=2000,
    )  # fmt: skip
    cache.add_sequence(0)
    cache.enable_sliding_window(0, 64, 4)
    for _ in range(100):
        with cache.forward([0], [2000]):
            pass
        assert len(cache.page_table(0)) <= 6
        cache.check_integrity()
    assert cache.sequence_length(0) == cache.total_length() == 64
    assert cache.sequence_window(0) == (64, 4, 200_000 - 64)
    stats = cache.stats()
    assert (stats["num_windowed_sequences"], stats["num_dropped_tokens"]) == (1, 200_000 - 64)


def test_pop_after_the_window_has_slid():
    """Also when other sequences then take the pages that became free."""
    for n in range(9):
        pair = Pair(max_total_tokens=64, seed=n)
        pair.add(0, 8, 2)
        pair.step([0], [21])
        pair.pop(0, n)
        assert pair.cache.sequence_window(0)[2] == (13 if n < 6 else 0)
        pair.add(1)
        pair.step([1], [30])
        pair.step([0, 1], [1, 1])
        pair.step([0], [14])
        pair.pop(0, 3)
        pair.step([1, 0], [3, 1])
        with pytest.raises(ValueError, match="cannot pop 9 positions .* which has 6"):
            pair.cache.pop_n(0, 9)
        pair.remove(0)
        pair.step([1], [1])


@pytest.mark.parametrize("text", [6, 21], ids=["before", "after"])
@pytest.mark.parametrize("page_size", [1, 4, 16])
def test_forks(page_size, text):
    """Anywhere in what is held; a child has no window of its own, but may be given one."""
    length = min(text, 8)
    for position in [*range(length + 1), -1]:
        pair = Pair(page_size=page_size)
        pair.add(0, 8, 2)
        pair.step([0], [text])
        pair.fork(0, 1, position)
        pair.fork(0, 2, position)
        dropped = text - length if position == -1 or position > 2 else 0
        assert pair.cache.sequence_window(1)[0] == 0
        assert pair.cache.sequence_window(1)[2] == dropped
        if dropped:
            with pytest.raises(ValueError, match="dropped positions behind its 2 sinks; .* got 3"):
                pair.cache.enable_sliding_window(1, 8, 3)
            pair.enable(1, 5, 2)
        else:
            pair.enable(1, 5, 4)
        pair.step([2, 0, 1], [9, 3, 1])  # shared pages are copied
        pair.step([1, 0], [14, 1])
        pair.fork(1, 3)
        pair.remove(0)
        pair.pop(2, 4)
        pair.step([3, 1, 2], [1, 1, 1])
        for seq_id in (1, 2, 3):
            pair.remove(seq_id)
        assert pair.cache.stats()["num_used_pages"] == 0


def test_shared_sinks_and_windows_are_copied_before_a_write():
    pair = Pair(page_size=4)
    pair.add(0, 10, 5)
    pair.step([0], [23])  # sinks in pages 0 and 1, then text positions 18 .. 22
    pair.fork(0, 1, 5)
    pair.fork(0, 2)
    table = pair.cache.page_table(0)
    assert pair.cache.page_table(1) == table[:2] and pair.cache.page_table(2) == table
    assert len(table) == 4
    pair.step([1, 2, 0], [2, 1, 1])  # 1 in the second sink page; of 2 and 0 the first one copies
    assert pair.cache.stats()["cow_page_copies"] == 2
    assert pair.cache.page_table(1)[0] == table[0] != pair.cache.page_table(1)[1]
    k, v = (x.numpy() for x in pair.cache.debug_get_kv(0))
    before = [x.numpy() for x in pair.cache.debug_get_kv(2)]
    pair.cache.debug_set_kv(2, 3, 0 * k[:, :4], 0 * v[:, :4])  # sinks and window
    np.testing.assert_array_equal(pair.cache.debug_get_kv(0)[0].numpy(), k)
    after = [x.numpy() for x in pair.cache.debug_get_kv(2)]
    for old, new in zip(before, after, strict=True):
        assert (new[:, 3:7] == 0).all()
        np.testing.assert_array_equal(
            np.delete(new, range(3, 7), 1), np.delete(old, range(3, 7), 1)
        )
    pair.cache.check_integrity()


def test_rows_from_outside():
    """Positions count what is held: the sinks, then the window."""
    pair = Pair((0, 0))
    pair.add(0, 8, 3)
    pair.step([0], [30])
    k, v = (x.numpy() for x in pair.cache.debug_get_kv(0))
    for layer in range(2):
        text = pair.expected.sequences[0][layer]
        np.testing.assert_array_equal(k[layer], text[0][[0, 1, 2, 25, 26, 27, 28, 29]])
        np.testing.assert_array_equal(v[layer], text[1][[0, 1, 2, 25, 26, 27, 28, 29]])
    part, _ = pair.cache.debug_get_kv(0, 2, 5)
    np.testing.assert_array_equal(part.numpy(), k[:, 2:5])
    with pytest.raises(ValueError, match="not within the 8 of sequence 0"):
        pair.cache.debug_get_kv(0, 2, 9)
    # A layer with a window of its own has not kept the sinks.
    pair = Pair((0, 6))
    pair.add(0, 8, 3)
    pair.step([0], [32])
    pair.step([0], [32])
    assert pair.cache.first_position(0, 0) == 0
    assert pair.cache.first_position(0, 1) == 3
    for begin in (0, 2):
        with pytest.raises(IndexError, match=f"position {begin} of sequence 0 is gone"):
            pair.cache.debug_get_kv(0, begin)
    k = pair.cache.debug_get_kv(0, 3)[0].numpy()
    for layer in range(2):
        np.testing.assert_array_equal(k[layer], pair.expected.sequences[0][layer][0][-5:])


def test_a_window_for_a_sequence_that_is_longer():
    """What lies outside is dropped at once."""
    pair = Pair()
    pair.add(0)
    pair.step([0], [29])
    used = pair.cache.stats()["num_used_pages"]
    pair.enable(0, 8, 2)
    pair.check()
    assert pair.cache.sequence_length(0) == 8
    assert pair.cache.stats()["num_used_pages"] == 4 < used
    pair.step([0], [1])
    pair.step([0], [20])


def test_refusals_change_nothing():
    pair = Pair()
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
    with cache.forward([0], [1]), pytest.raises(ValueError, match="not possible within a step"):
        cache.enable_sliding_window(1, 8, 2)


def test_caches_without_windows_of_sequences():
    enable = {
        "made without sliding_window": make_cache(),
        "rope_mode inline or none": make_cache(rope_mode=1, sliding_window=True),
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
    pair = Pair(kernels=KERNELS_WITH_TREES)
    pair.add(0, 8, 2)
    pair.add(1)
    pair.step([0, 1], [20, 3])
    pair.fork(0, 2, 5)
    cache, some = pair.cache, pair.qkv([3])
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
    """Of a sequence with a window or a gap; others of the cache have them."""
    pair = Pair()
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


def test_learned_sinks():
    """A logit of each head beside what a row sees."""
    pair = Pair()
    pair.add(0, 8, 3)
    pair.add(1)
    pair.step([0, 1], [26, 6])
    sinks = np.array([0.5, -1.0, 3.0, 0.0], "float32")
    for lengths in ([1, 1], [20, 2]):
        qkv = pair.qkv(lengths)
        o, _ = pair.expected.attention(0, [0, 1], lengths, qkv, 2, DIM**-0.5, sinks)
        with pair.cache.forward([0, 1], lengths):
            out = pair.cache.attention(0, qkv, sinks=sinks)
        pair.expected.end_step([0, 1])
        reference.assert_close(out.numpy(), o, "float32")


def test_a_full_cache():
    """A step that does not fit leaves the window where it was."""
    pair = Pair(max_total_tokens=32)
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


@pytest.mark.parametrize("mode", ["none", "inline"])
@pytest.mark.parametrize("window, sinks", [(4, 1), (9, 0), (12, 7)])
def test_self_and_cross_attention_merge_to_the_whole(window, sinks, mode):
    pair = Pair(mode=mode)
    pair.add(0, window, sinks)
    pair.add(1)
    pair.add(2, window, sinks)
    pair.step([0, 1], [28, 4])
    cache, most = pair.cache, window - sinks + 1
    for seq_ids, lengths in (
        ([1, 2, 0], [min(3, most), min(2, most), 1]),
        ([0, 1], [1, 1]),
        ([2, 0], [most, most]),
    ):
        qkv = pair.qkv(lengths)
        o, lse = pair.expected.attention(0, seq_ids, lengths, qkv, 2, DIM**-0.5)
        with cache.forward(seq_ids, lengths):
            parts = cache.self_attention(0, qkv[:, :4], qkv[:, 4:6], qkv[:, 6:])
            merged = cache.merge_attention(*parts, *cache.cross_attention(0, qkv[:, :4]))
        pair.expected.end_step(seq_ids)
        reference.assert_close(merged[0].numpy(), o, "float32", "o")
        reference.assert_close(merged[1].numpy(), lse, "float32", "lse")
    with cache.forward([0], [most + 1]):
        q, k = np.ones((most + 1, 4, DIM), "float32"), np.ones((most + 1, 2, DIM), "float32")
        with pytest.raises(ValueError, match=f"window of {window} .* use attention, or at most"):
            cache.self_attention(0, q, k, k)


def test_shared_kv():
    pair = Pair()
    pair.add(0, 8, 3)
    pair.step([0], [30])
    qkv = pair.qkv([5])
    o, _ = pair.expected.attention(0, [0], [5], qkv, 2, DIM**-0.5)
    with pair.cache.forward([0], [5]):
        pair.cache.attention(0, qkv)
        out = pair.cache.attention_with_shared_kv(0, qkv[:, :4], qkv[:, 4:6], qkv[:, 6:])
    reference.assert_close(out.numpy(), o, "float32")


@pytest.mark.parametrize("aux_manager", ["merged", "plain"])
def test_kernels_of_the_stock_cache_get_a_matrix(aux_manager):
    """Where the kernels for windows are stock ones: ``length_info [3, B]``, and only if needed."""
    seen = []

    def record(name):
        def kernel(*args):
            at = {"prefill": 5, "decode": 4}[name.split("_")[0]]
            seen.append((name, tuple(args[at].shape)))
            KERNELS[name](*args)

        return ["tirx", tvm_ffi.convert(kernel)]

    names = ("prefill", "decode", "prefill_sliding", "decode_sliding")
    pair = Pair(kernels={name: record(name) for name in names}, aux_manager=aux_manager)
    pair.add(0, 8, 2)
    pair.add(1)
    pair.step([1], [5])
    pair.step([1], [1])
    pair.step([1, 0], [4, 7])
    pair.step([0, 1], [1, 1])
    pair.step([0], [1])
    for _ in range(10):
        pair.step([0], [1])
    assert seen[:5] == [
        ("prefill", (1,)), ("decode", (1,)), ("prefill_sliding", (3, 2)),
        ("decode_sliding", (3, 2)), ("decode_sliding", (3, 1)),
    ]  # fmt: skip
    with pytest.raises(ValueError, match="need a kernel 'decode_sliding' of the same kind"):
        make_cache({"decode": record("decode"), "prefill_sliding": record("prefill_sliding")},
                   sliding_window=True)  # fmt: skip
