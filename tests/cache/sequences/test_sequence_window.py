# SPDX-License-Identifier: Apache-2.0
"""Windows of sequences: exact in any chunking, with pages that follow the window."""

from __future__ import annotations

import numpy as np
import pytest
import tvm_ffi

from ... import reference
from ...support.cases.caches.cache_cases import DIM, HEADS, ROPE
from ...support.cases.caches.sequence_window_cases import CHUNKINGS, WindowPair
from ...support.emulators.python_kernels import KERNELS, make_cache
from ...support.harness.selections import latin_square
from ...support.worlds.permissive_steps import permissive_step


@latin_square(3, "mode", "page_size", "chunking")
@pytest.mark.parametrize("mode", ["none", "normal", "inline"])
@pytest.mark.parametrize("chunking", CHUNKINGS)
@pytest.mark.parametrize("page_size", [1, 4, 32])
@pytest.mark.parametrize("window, sinks", [(1, 0), (2, 1), (8, 2), (20, 5), (33, 32)])
def test_any_chunking(window, sinks, page_size, chunking, mode):
    pair = WindowPair(mode=mode, page_size=page_size)
    pair.add(0, window + pair.row, sinks)
    pair.add(1)
    most = -(-sinks // page_size) + -(-(window - sinks) // page_size) + 1
    for seq_ids, lengths in CHUNKINGS[chunking]:
        pair.step(seq_ids, lengths)
        assert pair.num_pages(0) <= most


@pytest.mark.parametrize("mode", ["none", "normal", "inline"])
@pytest.mark.parametrize("includes_self", [False, True])
def test_a_window_includes_the_row_where_the_cache_says_so(includes_self, mode):
    pair = WindowPair(mode=mode, includes_self=includes_self)
    pair.add(0, 20, 5)
    pair.add(1)
    for seq_ids, lengths in CHUNKINGS["mixed"]:
        pair.step(seq_ids, lengths)
    assert pair.cache.sequence_length(0) == (19 if includes_self else 20)


@pytest.mark.parametrize("mode", [0, 1, 2])
@pytest.mark.parametrize("seed", range(3))
def test_the_chunking_does_not_matter(seed, mode):
    """The same rows give the same results, whatever they were cut into."""
    rng = np.random.default_rng(seed)
    qkv = rng.standard_normal((70, HEADS, DIM)).astype("float32")
    results = []
    for cuts in ([1] * 70, [32, 32, 6], [5, 20, 1, 1, 30, 13]):
        cache = make_cache(num_layers=1, rope_mode=mode, sliding_window=True)
        cache.add_sequence(0)
        cache.enable_sliding_window(0, 11, 3)
        rows = []
        for part in np.split(qkv, np.cumsum(cuts)[:-1]):
            with cache.forward([0], [len(part)]):
                rows.append(cache.attention(0, part).numpy())
        results.append(np.concatenate(rows))
    for other in results[1:]:
        reference.assert_close(other, results[0], "float32")


@pytest.mark.parametrize("chunks", [[1] * 45, [13, 32], [32, 1, 1, 11], [5, 20, 20]])
@pytest.mark.parametrize("window", [2, 7, 16, 40])
def test_as_the_mask_of_a_model(window, chunks):
    """Mode "normal" without sinks is what models with a window compute over the whole text.

    There row i sees the columns j with i - window < j <= i, rotated by their positions.
    """
    pair = WindowPair(mode="normal", page_size=4)
    cache, text = pair.cache, pair.qkv(sum(chunks))
    cache.add_sequence(0)
    cache.enable_sliding_window(0, window, 0)
    rows = []
    for part in np.split(text, np.cumsum(chunks)[:-1]):
        with cache.forward([0], [len(part)]):
            rows.append(cache.attention(0, part).numpy())
        assert cache.sequence_length(0) <= window - 1
    at = np.arange(len(text))
    mask = (at[:, None] - at < window) & (at <= at[:, None])
    q, k = (reference.rotate(x, at, ROPE) for x in (text[:, :4], text[:, 4:6]))
    o, _ = reference.attention(q, k, text[:, 6:], mask, DIM**-0.5)
    reference.assert_close(np.concatenate(rows), o, "float32")


@pytest.mark.parametrize("mode", ["normal", "inline"])
@pytest.mark.parametrize("window, sinks", [(8, 2), (16, 0), (30, 9)])
def test_beside_layers_with_windows(window, sinks, mode):
    """Layers with a window of their own follow that one alone."""
    for layers in ((0, 6), (6,), (0, 60, 12)):
        pair = WindowPair(layers, mode)
        pair.slide(window, sinks, num_decodes=8)


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
        with permissive_step(cache, [0], [2000]):
            pass
        assert len(cache.page_table(0)) <= 6
        cache.check_integrity()
    assert cache.sequence_length(0) == cache.total_length() == 64
    assert cache.sequence_window(0) == (64, 4, 200_000 - 64)
    stats = cache.stats()
    assert (stats["num_windowed_sequences"], stats["num_dropped_tokens"]) == (1, 200_000 - 64)


@pytest.mark.parametrize("mode", ["normal", "inline"])
def test_pop_after_the_window_has_slid(mode):
    """Also when other sequences then take the pages that became free."""
    for n in range(9):
        pair = WindowPair(mode=mode, max_total_tokens=64, seed=n)
        pair.add(0, 8 + pair.row, 2)
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


@pytest.mark.parametrize("mode", ["normal", "inline"])
@pytest.mark.parametrize("text", [6, 21], ids=["before", "after"])
@pytest.mark.parametrize("page_size", [1, 4, 16])
def test_forks(page_size, text, mode):
    """Anywhere in what is held; a child has no window of its own, but may be given one."""
    length = min(text, 8)
    for position in [*range(length + 1), -1]:
        pair = WindowPair(mode=mode, page_size=page_size)
        pair.add(0, 8 + pair.row, 2)
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
            pair.enable(1, 5 + pair.row, 4)
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
    pair = WindowPair(page_size=4)
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
    pair = WindowPair((0, 0))
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
    pair = WindowPair((0, 6))
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
    """Positions outside the window are dropped at once."""
    pair = WindowPair()
    pair.add(0)
    pair.step([0], [29])
    used = pair.cache.stats()["num_used_pages"]
    pair.enable(0, 8, 2)
    pair.check()
    assert pair.cache.sequence_length(0) == 8
    assert pair.cache.stats()["num_used_pages"] == 4 < used
    pair.step([0], [1])
    pair.step([0], [20])


def test_learned_sinks():
    """A logit of each head beside what a row sees."""
    pair = WindowPair()
    pair.add(0, 8, 3)
    pair.add(1)
    pair.step([0, 1], [26, 6])
    sinks = np.array([0.5, -1.0, 3.0, 0.0], "float32")
    for lengths in ([1, 1], [20, 2]):
        qkv = pair.qkv(sum(lengths))
        o, _ = pair.whole(0, [0, 1], lengths, qkv, sinks)
        with pair.cache.forward([0, 1], lengths):
            out = pair.cache.attention(0, qkv, sink_logits=sinks)
        pair.expected.end_step([0, 1])
        reference.assert_close(out.numpy(), o, "float32")


@pytest.mark.parametrize("mode", ["none", "inline"])
@pytest.mark.parametrize("window, sinks", [(4, 1), (9, 0), (12, 7)])
def test_self_and_cross_attention_merge_to_the_whole(window, sinks, mode):
    pair = WindowPair(mode=mode)
    window += pair.row
    pair.add(0, window, sinks)
    pair.add(1)
    pair.add(2, window, sinks)
    pair.step([0, 1], [28, 4])
    most = window - pair.row - sinks + 1
    for seq_ids, lengths in (
        ([1, 2, 0], [min(3, most), min(2, most), 1]),
        ([0, 1], [1, 1]),
        ([2, 0], [most, most]),
    ):
        with pair.cache.forward(seq_ids, lengths):
            pair.attend_in_parts(0, seq_ids, lengths, pair.qkv(sum(lengths)))
        pair.expected.end_step(seq_ids)
    with permissive_step(pair.cache, [0], [most + 1]):
        q, k = np.ones((most + 1, 4, DIM), "float32"), np.ones((most + 1, 2, DIM), "float32")
        with pytest.raises(ValueError, match=f"window of {window} .* use attention, or at most"):
            pair.cache.self_attention(0, q, k, k)


def test_shared_kv():
    pair = WindowPair()
    pair.add(0, 8, 3)
    pair.step([0], [30])
    qkv = pair.qkv(5)
    o, _ = pair.whole(0, [0], [5], qkv)
    with pair.cache.forward([0], [5]):
        pair.cache.attention(0, qkv)
        out = pair.cache.attention_with_shared_kv(0, qkv[:, :4], qkv[:, 4:6], qkv[:, 6:])
    reference.assert_close(out.numpy(), o, "float32")


@pytest.mark.parametrize("aux_manager", ["merged", "plain"])
def test_kernels_of_the_stock_cache_get_a_matrix(aux_manager):
    """Where the kernels for windows are stock ones: ``lengths [3, B]``, and only if needed."""
    seen = []

    def record(name):
        def kernel(*args):
            at = {"prefill": 5, "decode": 4}[name.split("_")[0]]
            seen.append((name, tuple(args[at].shape)))
            KERNELS[name](*args)

        return ["tirx", tvm_ffi.convert(kernel)]

    names = ("prefill", "decode", "prefill_sliding", "decode_sliding")
    pair = WindowPair(kernels={name: record(name) for name in names}, aux_manager=aux_manager)
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


if __name__ == "__main__":
    import tvm.testing

    tvm.testing.main()
