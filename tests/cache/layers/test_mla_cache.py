# SPDX-License-Identifier: Apache-2.0
"""MLA layers of the cache object: the ways through a step, forks, mixed models."""

from __future__ import annotations

import ml_dtypes  # noqa: F401  (registers bfloat16 with NumPy)
import numpy as np
import pytest

import tvm_pagedkv as pkv

from ... import reference
from ...support.cases.caches.mla_cache_cases import (
    CKV,
    HEADS,
    KPE,
    NUM_LAYERS,
    QK_DIM,
    SM_SCALE,
    V_DIM,
    MLAPair,
    compiled_kernels,
    make_mla_cache,
)
from ...support.emulators.python_kernels import (
    KERNELS,
    LAYER,
    MLA_KERNELS,
    MLA_LAYER,
    make_cache,
    poison,
    shuffle,
)
from ...support.worlds.permissive_steps import permissive_step


@pytest.mark.parametrize("aux_manager", ["merged", "plain"])
@pytest.mark.parametrize("kernels", ["numpy", "float32", "bfloat16"])
def test_every_way_through_a_step(kernels, aux_manager):
    dtype = "float32" if kernels == "numpy" else kernels
    own = {} if kernels == "numpy" else compiled_kernels(dtype)
    pair = MLAPair(make_mla_cache(own, dtype=dtype, aux_manager=aux_manager))
    shuffle(pair.cache, 3)
    pair.add(0, 1, 2)
    pair.step([0, 1], [5, 9], "prefill")
    pair.step([0, 1], [1, 1], "decode")
    pair.step([1, 2, 0], [1, 7, 3], "extend")
    pair.step([2, 0, 1], [1, 1, 1], "decode")
    pair.step([1, 2], [1, 1], "extend")  # one row each, in parts all the same
    pair.step([0], [1], "decode")
    pair.check_rows()


def test_learned_sinks():
    kernels = compiled_kernels("float32", sink_logits=True)
    layers = [{**MLA_LAYER, "sink_logits": True}] * NUM_LAYERS
    sinks = np.array([0.5, -np.inf, 3.0, -2.0], "f4")
    pair = MLAPair(make_mla_cache(kernels, layers=layers), sinks=sinks)
    pair.add(0, 1)
    pair.step([0, 1], [5, 9], "prefill")
    pair.step([0, 1], [1, 1], "decode")
    pair.step([1, 0], [1, 3], "extend")
    pair.sinks = None
    pair.step([0, 1], [1, 1], "decode")
    pair.check_rows()


def test_layers_without_learned_sinks_refuse_them():
    cache = make_mla_cache()
    cache.add_sequence(0)
    q, sinks = np.zeros((1, HEADS, CKV + KPE), "f4"), np.zeros(HEADS, "f4")
    with permissive_step(cache, [0], [1]):
        cache.append_mla_kv(0, np.zeros((1, CKV + KPE), "f4"))
        with pytest.raises(ValueError, match="an MLA layer needs sink_logits=True"):
            cache.cross_attention(0, q, sink_logits=sinks)


@pytest.mark.parametrize("kernels", ["numpy", "float32"])
def test_forks_pops_and_copies(kernels):
    own = {} if kernels == "numpy" else compiled_kernels("float32")
    pair = MLAPair(make_mla_cache(own))
    pair.add(0)
    pair.step([0], [10], "prefill")
    pair.fork(0, 1)
    pair.fork(1, 2, 6)
    pair.fork(2, 3, 0)
    assert pair.cache.stats()["num_shared_pages"] == 3
    pair.step([2], [1], "decode")
    pair.step([0, 1], [1, 3], "extend")
    assert pair.cache.stats()["cow_page_copies"] == 2
    pair.step([3], [2], "prefill")
    pair.pop(0, 5)
    pair.pop(2, 7)
    pair.step([0, 1, 3], [1, 1, 1], "decode")
    pair.step([2], [4], "extend")
    pair.check_rows()
    for seq_id in (0, 2, 1, 3):
        pair.cache.remove_sequence(seq_id)
        pair.cache.check_integrity()
    assert pair.cache.num_available_pages() == 16


@pytest.mark.parametrize("page_size", [1, 2, 16])
def test_page_sizes(page_size):
    pair = MLAPair(make_mla_cache(compiled_kernels("float32", page_size), page_size=page_size))
    pair.add(0, 1)
    pair.step([0, 1], [3, 17], "prefill")
    pair.fork(1, 2, 5)
    pair.step([2, 0], [4, 1], "extend")
    pair.step([0, 1, 2], [1, 1, 1], "decode")
    pair.check_rows()


def test_rows_that_are_set_from_outside():
    pair = MLAPair(make_mla_cache())
    pair.add(0)
    pair.step([0], [6], "prefill")
    pair.fork(0, 1)
    rows = pair.normal(NUM_LAYERS, 3, CKV + KPE)
    pair.cache.debug_set_kv_mla(1, 2, rows)
    np.testing.assert_array_equal(pair.cache.debug_get_kv_mla(1, 2, 5).numpy(), rows)
    for layer in range(NUM_LAYERS):
        before = pair.expected.latent(0, layer)
        np.testing.assert_array_equal(pair.cache.debug_get_kv_mla(0).numpy()[layer], before)
    pair.cache.check_integrity()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_cache_from_a_configuration(dtype):
    config = pkv.KVCacheConfig(
        num_layers=NUM_LAYERS,
        num_qo_heads=HEADS,
        num_kv_heads=HEADS,  # as configurations of models have it
        qk_head_dim=CKV + KPE,
        v_head_dim=CKV,
        dtype=dtype,
        page_size=4,
        max_total_tokens=64,
        layers=[
            pkv.LayerSpec("mla", mla_original_qk_head_dim=QK_DIM, mla_original_v_head_dim=V_DIM)
        ]
        * NUM_LAYERS,
    )
    pair = MLAPair(pkv.create(config))
    assert pair.cache.stats()["allocated_bytes"] == config.memory_bytes()
    pair.add(0, 1)
    pair.step([0, 1], [5, 9], "prefill")
    pair.step([1, 0], [2, 1], "extend")
    pair.step([1, 0], [1, 1], "decode")
    pair.check_rows()


def cross_lse(pair: MLAPair, layer: int, q: np.ndarray) -> np.ndarray:
    return pair.cache.cross_attention(layer, q)[1].numpy()


def test_cross_attention_covers_the_step_where_self_attention_was_not_called():
    """This holds for every choice of layers, and is decided anew in each step."""
    pair = MLAPair(make_mla_cache())
    pair.add(0, 1)
    pair.step([0], [5], "prefill")  # sequence 1 is empty
    rows = pair.normal(2, HEADS, QK_DIM)
    for self_layers in ([], [0], [1], [0, 1], []):
        with pair.cache.forward([0, 1], [1, 1]):
            for layer in range(NUM_LAYERS):
                latent, q = pair.normal(2, CKV + KPE), pair.normal(2, HEADS, CKV + KPE)
                pair.cache.append_mla_kv(layer, latent)
                pair.expected.append(layer, [0, 1], [1, 1], latent)
                if layer in self_layers:
                    pair.cache.self_attention(layer, rows, rows, rows[:, :, :V_DIM])
                want = pair.expected.absorbed(
                    layer, [0, 1], [1, 1], q, CKV, SM_SCALE, layer not in self_layers
                )
                for _ in range(2):
                    actual = pair.cache.cross_attention(layer, q)
                    reference.assert_state_close([x.numpy() for x in actual], want, "float32")


def test_cross_attention_covers_the_past_where_a_sequence_appends_more_rows():
    pair = MLAPair(make_mla_cache())
    pair.add(0, 1)
    pair.step([0], [5], "prefill")
    with permissive_step(pair.cache, [0, 1], [2, 1]):
        q = pair.normal(3, HEADS, CKV + KPE)
        before = cross_lse(pair, 0, q)
        latent = pair.normal(3, CKV + KPE)
        pair.cache.append_mla_kv(0, latent)
        np.testing.assert_array_equal(cross_lse(pair, 0, q), before)
        assert np.isneginf(before[2]).all()
        pair.expected.append(0, [0, 1], [2, 1], latent)
        want = pair.expected.absorbed(0, [0, 1], [2, 1], q, CKV, SM_SCALE, with_step=False)
        reference.assert_lse_close(before, want[1], "float32")


@pytest.mark.parametrize("own", ["numpy", "compiled"])
def test_mha_and_mla_layers_in_one_cache(own):
    kernels = {} if own == "numpy" else compiled_kernels("float32")
    sets = [KERNELS, {**MLA_KERNELS, **kernels}]
    mla = {**MLA_LAYER, "kernel_set": 1}
    cache = make_cache(sets, layers=[mla, LAYER, mla, LAYER])
    stats = cache.stats()
    assert [group["num_layers"] for group in stats["groups"]] == [2, 2]
    expected = reference.ReferenceCache(2, np.dtype("float32"))
    pair = MLAPair(cache)
    cache.add_sequence(0)
    expected.add_sequence(0)
    pair.expected.add_sequence(0)
    for seq_ids, lengths in (([0], [6]), ([0, 1], [1, 2]), ([1, 0], [1, 1])):
        with cache.forward(seq_ids, lengths):
            for i in range(2):
                qkv = pair.normal(sum(lengths), 8, 8)
                out = cache.attention(2 * i + 1, qkv).numpy()
                o, _ = expected.attention(i, seq_ids, lengths, qkv, 2, 8**-0.5)
                reference.assert_close(out, o, "float32")
                latent = pair.normal(sum(lengths), CKV + KPE)
                q = pair.normal(sum(lengths), HEADS, QK_DIM)
                cache.append_mla_kv(2 * i, latent)
                pair.expected.append(i, seq_ids, lengths, latent)
                result = pair.self_attention(2 * i, q, latent)
                result = cache.merge_attention(*result, *pair.cross(2 * i, q))
                o, lse = pair.expected.non_absorbed(
                    i, seq_ids, lengths, q, pair.w_k, pair.w_v, SM_SCALE
                )
                reference.assert_close(result[0].numpy(), o, "float32")
                reference.assert_lse_close(result[1].numpy(), lse, "float32")
        cache.check_integrity()
        shuffle(cache, 1)
        poison(cache)
        if not cache.stats()["num_shared_pages"]:
            for each in (cache, expected, pair.expected):
                if 1 not in expected.sequences or each is not expected:
                    each.fork_sequence(0, 1)
    k, v = (x.numpy() for x in cache.debug_get_kv(1))
    latent = cache.debug_get_kv_mla(1).numpy()
    for i in range(2):
        for got, want in zip((k[i], v[i]), expected.kv(1, i), strict=True):
            np.testing.assert_array_equal(got, want)
        np.testing.assert_array_equal(latent[i], pair.expected.latent(1, i))


if __name__ == "__main__":
    import tvm.testing

    tvm.testing.main()
