# SPDX-License-Identifier: Apache-2.0
"""The step: append and attend, forks, self and cross attention, groups, and failing copies."""

from __future__ import annotations

import numpy as np
import pytest
import tvm_ffi

from ... import reference
from ...support.cases.caches.cache_cases import DIM, HEADS, MODES, PlainPair
from ...support.emulators import python_kernels
from ...support.emulators.python_kernels import KERNELS, LAYER, make_cache, shuffle, snapshot
from ...support.worlds.permissive_steps import permissive_step

NUM_LAYERS = 2


@pytest.mark.parametrize("aux_manager", ["merged", "plain", "auto"])
@pytest.mark.parametrize("mode", list(MODES))
def test_steps_agree_with_the_reference(mode, aux_manager):
    cache = make_cache(rope_mode=MODES[mode], aux_manager=aux_manager)
    pair = PlainPair(cache, mode)
    shuffle(cache, 3)
    pair.add(0, 1, 2)
    pair.step([0, 1], [5, 9])
    pair.step([1, 2, 0], [1, 7, 3])
    pair.step([2, 0, 1], [1, 1, 1])
    pair.step([0], [1])
    pair.check_rows()


@pytest.mark.parametrize("page_size", [1, 2, 16])
def test_page_sizes(page_size):
    pair = PlainPair(make_cache(page_size=page_size))
    pair.add(0, 1)
    pair.step([0, 1], [3, 17])
    pair.fork(1, 2, 5)
    pair.step([2, 0], [4, 1])
    pair.step([0, 1, 2], [1, 1, 1])
    pair.check_rows()


def test_rope_append_takes_the_place_of_split_and_append():
    def fail(*args):
        raise AssertionError("not needed")

    kernels = {"rope_append": python_kernels.rope_append, "split_rotary": fail}
    pair = PlainPair(make_cache(kernels, rope_mode=1), "normal")
    pair.add(0, 1)
    pair.step([0, 1], [5, 3])
    pair.step([0, 1], [1, 1])
    pair.check_rows()


def test_append_prefill_serves_steps_of_several_rows():
    calls = []

    def noted(name):
        def kernel(*args):
            calls.append(name)
            getattr(python_kernels, name)(*args)

        return kernel

    names = ("append_prefill", "rope_append", "prefill", "decode")
    pair = PlainPair(make_cache({name: noted(name) for name in names}, rope_mode=1), "normal")
    pair.add(0, 1)
    for lengths, expected in (
        ([5, 3], ["append_prefill"]),
        ([4, 1], ["rope_append", "prefill"]),  # a single row is attended to as in decode
        ([2, 9], ["append_prefill"]),
        ([1, 1], ["rope_append", "decode"]),
    ):
        calls.clear()
        pair.step([0, 1], lengths)
        assert calls == expected * NUM_LAYERS, lengths
    pair.check_rows()


@pytest.mark.parametrize("mode", ["none", "inline"])
def test_append_prefill_of_rope_modes(mode):
    calls = []

    def append_prefill(*args):
        calls.append(args)
        python_kernels.append_prefill(*args)

    cache = make_cache({"append_prefill": append_prefill}, rope_mode=MODES[mode])
    pair = PlainPair(cache, mode)
    pair.add(0)
    pair.step([0], [6])
    pair.check_rows()
    assert bool(calls) == (mode == "none")  # inline: attention rotates K too


def test_half_precision_pages():
    pair = PlainPair(make_cache(dtype="float16"))
    pair.add(0)
    pair.step([0], [9])
    pair.step([0], [1])
    pair.check_rows()


def test_pages_of_another_type_than_the_step():
    cache = make_cache(kv_dtype="float16")
    cache.add_sequence(0)
    with permissive_step(cache, [0], [3]):
        cache.attention(0, np.ones((3, HEADS, DIM), "float32"))
    assert str(cache.debug_get_kv(0)[0].dtype) == "float16"


def test_forks_share_pages_and_copy_before_a_write():
    pair = PlainPair(make_cache())
    pair.add(0)
    pair.step([0], [10])
    pair.fork(0, 1)
    pair.fork(1, 2, 6)
    pair.fork(2, 3, 0)
    stats = pair.cache.stats()
    assert (stats["num_used_pages"], stats["num_shared_pages"]) == (3, 3)
    pair.step([2], [1])  # copies page 1 with 2 rows
    pair.step([0, 1], [1, 3])  # one of them copies the last page, the other keeps it
    assert pair.cache.stats()["cow_page_copies"] == 2
    assert pair.cache.page_table(0)[:2] == pair.cache.page_table(1)[:2]
    pair.step([3], [2])
    pair.check_rows()
    for seq_id in (0, 2, 1, 3):
        pair.check_rows()
        pair.remove(seq_id)
        pair.cache.check_integrity()
    assert pair.cache.num_available_pages() == 16


def test_deep_forks():
    pair = PlainPair(make_cache(max_num_sequences=40, max_total_tokens=512))
    pair.add(0)
    pair.step([0], [7])
    for depth in range(30):
        pair.fork(depth, depth + 1)
        pair.step([depth + 1], [1])
    pair.check_rows()
    pair.step([0, 15, 30], [1, 2, 1])
    pair.check_rows()


def test_page_tables_larger_than_the_pool():
    # 12 forks of 20 pages: 240 entries of a pool of 40 pages, so the merged buffer must grow.
    pair = PlainPair(make_cache(max_num_sequences=16, max_total_tokens=160, share_prefix=False))
    pair.add(0)
    for n in (32, 32, 16):
        pair.step([0], [n])
    before = pair.cache.stats()["aux_bytes"]
    for child in range(1, 13):
        pair.fork(0, child)
    pair.step(list(range(13)), [1] * 13)
    stats = pair.cache.stats()
    assert stats["aux_bytes"] > before
    parts = stats["page_pool_bytes"] + stats["workspace_bytes"] + stats["aux_bytes"]
    assert stats["allocated_bytes"] == parts
    pair.step(list(range(13)), [1] * 13)


@pytest.mark.parametrize("together, num_calls_before", [(0, 0), (0, 1), (0, 3), (1, 0), (1, 1)])
def test_a_copy_that_fails_changes_nothing(together, num_calls_before):
    calls = []

    def failing(kernel):
        def copy(*args):
            if len(calls) == num_calls_before:
                raise RuntimeError("out of ink")
            calls.append(args)
            kernel(*args)

        return copy

    names = ("copy_single_page", "copy_pages")[: 1 + together]
    cache = make_cache({name: failing(getattr(python_kernels, name)) for name in names})
    pair = PlainPair(cache)
    pair.add(0)
    pair.step([0], [6])
    pair.fork(0, 1)
    pair.fork(0, 2, 5)
    before = snapshot(cache, [0, 1, 2])
    for _ in range(2):
        with pytest.raises(RuntimeError, match="out of ink"):
            cache.begin_forward([1, 2], [3, 1])
        assert snapshot(cache, [0, 1, 2]) == before
        cache.check_integrity()
    rows = np.ones((NUM_LAYERS, 3, 2, DIM), "float32")
    with pytest.raises(RuntimeError, match="out of ink"):
        cache.debug_set_kv(1, 0, rows, rows)
    assert snapshot(cache, [0, 1, 2]) == before
    calls.extend([None] * 100)
    pair.step([1, 2], [3, 1])
    pair.check_rows()


class _CountedCopies:
    """The kernel `copy_pages`, and how many pages each call copied."""

    def __init__(self):
        self.counts = []

    def __call__(self, pages, copies):
        self.counts.append(copies.shape[1])
        python_kernels.copy_pages(pages, copies)


def test_pages_of_several_forks_are_copied_at_once():
    """A call for each layer."""
    copy = _CountedCopies()
    cache = make_cache({"copy_pages": copy})
    pair = PlainPair(cache)
    pair.add(0)
    pair.step([0], [6])
    for child in range(1, 5):
        pair.fork(0, child)
    pair.step([1, 2, 3, 4], [1, 2, 1, 7])
    pair.check_rows()
    assert copy.counts == [4] * NUM_LAYERS and cache.stats()["cow_page_copies"] == 4
    pair.step([0], [1])  # it shares the page with nobody any more
    assert len(copy.counts) == NUM_LAYERS


def test_more_pages_than_there_is_room_for_are_copied_in_turns():
    copy = _CountedCopies()
    cache = make_cache({"copy_pages": copy}, max_num_sequences=2, page_size=4)
    pair = PlainPair(cache)
    pair.add(0)
    pair.step([0], [18])
    cache.fork_sequence(0, 1)
    before = cache.stats()
    rows = np.random.default_rng(0).standard_normal((2, NUM_LAYERS, 18, 2, DIM)).astype("f4")
    cache.debug_set_kv(1, 0, *rows)
    for actual, expected in zip(cache.debug_get_kv(1), rows, strict=True):
        reference.assert_same_bits(actual.numpy(), expected)
    pair.check_rows()  # of the other one
    assert copy.counts == [2, 2, 2, 2, 1, 1]
    assert cache.stats()["aux_bytes"] == before["aux_bytes"]


def test_a_kernel_that_calls_back_finds_the_cache_busy():
    cache = None

    def copy(*args):
        cache.remove_sequence(0)

    cache = make_cache({"copy_single_page": copy})
    pair = PlainPair(cache)
    pair.add(0)
    pair.step([0], [6])
    pair.fork(0, 1)
    with pytest.raises(ValueError, match="within a step"):
        cache.begin_forward([1], [1])
    cache.check_integrity()
    assert not cache.is_in_forward


@pytest.mark.parametrize("mode", ["none", "inline"])
def test_self_and_cross_attention_merge_to_the_whole(mode):
    pair = PlainPair(make_cache(rope_mode=MODES[mode]), mode)
    pair.add(0, 1, 2)
    pair.step([0, 1], [9, 4])
    # What a step appends, the next one finds: [2] crosses a page that only this API has written.
    for seq_ids, lengths in (([1, 2, 0], [3, 2, 1]), ([0, 1], [1, 1]), ([2, 1], [4, 1])):
        qkv = pair.qkv(sum(lengths))
        o, lse = pair.whole(0, seq_ids, lengths, qkv)
        cache = pair.cache
        with permissive_step(cache, seq_ids, lengths):
            self_o, self_lse = cache.self_attention(0, qkv[:, :4], qkv[:, 4:6], qkv[:, 6:])
            cross_o, cross_lse = cache.cross_attention(0, qkv[:, :4])
            again, _ = cache.cross_attention(0, qkv[:, :4])
            np.testing.assert_array_equal(again.numpy(), cross_o.numpy())
            merged = cache.merge_attention(self_o, self_lse, cross_o, cross_lse)
            assert merged[0].same_as(self_o) and merged[1].same_as(self_lse)
            reference.assert_close(self_o.numpy(), o, "float32", "o")
            reference.assert_lse_close(self_lse.numpy(), lse, "float32", "lse")
            if lengths == [3, 2, 1]:
                assert (cross_o.numpy()[3:5] == 0).all()
                assert np.isneginf(cross_lse.numpy()[3:5]).all()
        cache.check_integrity()


@pytest.mark.parametrize("aux_manager", ["merged", "plain"])
def test_cross_attention_to_nothing(aux_manager):
    cache = make_cache(aux_manager=aux_manager)
    cache.add_sequence(0)
    with permissive_step(cache, [0], [2]):
        o, lse = cache.cross_attention(0, np.ones((2, 4, DIM), "float32"))
    assert (o.numpy() == 0).all() and np.isneginf(lse.numpy()).all()


def test_layers_of_different_shapes_have_groups():
    small = {**LAYER, "num_qo_heads": 2, "num_kv_heads": 1, "qk_head_dim": 16}
    cache = make_cache(layers=[LAYER, small, LAYER])
    stats = cache.stats()
    assert [group["num_layers"] for group in stats["groups"]] == [2, 1]
    assert stats["num_pages"] == 2 * 16
    expected = [
        reference.ReferenceCache(1, np.dtype("float32")),
        reference.ReferenceCache(1, np.dtype("float32")),
    ]
    rng = np.random.default_rng(0)
    cache.add_sequence(0)
    for each in expected:
        each.add_sequence(0)
    for seq_ids, lengths in (([0], [6]), ([0, 1], [1, 2])):
        with permissive_step(cache, seq_ids, lengths):
            for group, layer in ((0, 2), (1, 1)):
                spec = cache.description["layers"][layer]
                heads = spec["num_qo_heads"] + 2 * spec["num_kv_heads"]
                dim = spec["qk_head_dim"]
                qkv = rng.standard_normal((sum(lengths), heads, dim)).astype("float32")
                out = cache.attention(layer, qkv).numpy()
                o, _ = expected[group].attention(
                    0, seq_ids, lengths, qkv, spec["num_kv_heads"], dim**-0.5
                )
                reference.assert_close(out, o, "float32", f"layer {layer}")
        if not cache.stats()["num_shared_pages"]:
            cache.fork_sequence(0, 1)
            for each in expected:
                each.fork_sequence(0, 1)
    assert cache.stats()["cow_page_copies"] == 2
    assert len(cache.page_table(0, 1)) == 2
    cache.check_integrity()
    with pytest.raises(ValueError, match="differ in their heads"):
        cache.debug_get_kv(0)


def test_kernel_sets_by_layer():
    used = []

    def named(name):
        def decode(*args):
            used.append(name)
            KERNELS["decode"](*args)

        return {**KERNELS, "decode": decode}

    cache = make_cache(
        [named("a"), named("b")], layers=[{**LAYER, "kernel_set": 1}, {**LAYER, "kernel_set": 0}]
    )
    assert len(cache.stats()["groups"]) == 1
    cache.add_sequence(0)
    with cache.forward([0], [1]):
        for layer in range(2):
            cache.attention(layer, np.ones((1, HEADS, DIM), "float32"))
    assert used == ["b", "a"]


def test_longrope_factors_reach_the_kernels():
    seen = []

    def split_rotary(qkv, positions, q, k, v, factors):
        seen.append(factors)
        python_kernels.split_rotary(qkv, positions, q, k, v, 0)

    factors = tvm_ffi.from_dlpack(np.ones(DIM, "float32"))
    cache = make_cache({"split_rotary": split_rotary}, rope_mode=1, rope_ext_factors=factors)
    cache.add_sequence(0)
    with permissive_step(cache, [0], [2]):
        cache.attention(0, np.ones((2, HEADS, DIM), "float32"))
    assert seen[0].same_as(factors)


def test_query_positions():
    cache = make_cache()
    cache.add_sequence(0)
    cache.add_sequence(1)
    with permissive_step(cache, [1, 0], [2, 3]):
        first = cache.query_positions()
        assert str(first.dtype) == "int32"
        assert first.numpy().tolist() == [0, 1, 0, 1, 2]
    with permissive_step(cache, [0, 1], [1, 1]):
        assert cache.query_positions().numpy().tolist() == [3, 2]
    assert tuple(first.shape) == (5,)


if __name__ == "__main__":
    import tvm.testing

    tvm.testing.main()
