# SPDX-License-Identifier: Apache-2.0
"""MLA layers with a window: exact in any chunking, with pages that follow the window.

Random calls, checkpoints, transfers and token trees meet such layers in the tests of these.
"""

from __future__ import annotations

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
    V_DIM,
    MLAPair,
    compiled_kernels,
    make_mla_cache,
)
from ...support.emulators.python_kernels import (
    MLA_KERNELS,
    MLA_LAYER,
    make_cache,
    shuffle,
    snapshot,
)
from ...support.emulators.python_tree_kernels import MLA_KERNELS_WITH_TREES
from ...support.worlds.permissive_steps import permissive_step

# Ways through steps of two sequences, in chunks that are longer and shorter than the windows.
CHUNKINGS = {
    "one by one": [([0, 1], [1, 1], "decode")] * 40,
    "chunks": [
        ([0, 1], [13, 2], "prefill"),
        ([1, 0], [18, 1], "extend"),
        ([0], [30], "extend"),
        ([1, 0], [1, 1], "extend"),
        ([0, 1], [1, 1], "decode"),
    ],
    "mixed": [([0], [32], "prefill"), ([0], [1], "decode"), ([1, 0], [1, 31], "extend")],
}


def make_pair(windows=(6, 6), kernels=None, sinks=None, seed: int = 0, **fields) -> MLAPair:
    layers = [{**MLA_LAYER, "window": window} for window in windows]
    layers = [{**each, "sink_logits": True} for each in layers] if sinks is not None else layers
    cache = make_mla_cache(kernels, layers=layers, **{"max_total_tokens": 256, **fields})
    shuffle(cache, seed)
    return MLAPair(cache, seed, sinks)


@pytest.mark.parametrize("chunking", CHUNKINGS)
@pytest.mark.parametrize("page_size", [1, 4, 64])
@pytest.mark.parametrize("windows", [(1, 0), (5, 60), (6, 6)], ids=str)
def test_any_chunking(windows, page_size, chunking):
    pair = make_pair(windows, page_size=page_size)
    pair.add(0, 1)
    for step in CHUNKINGS[chunking]:
        pair.step(*step)
    pair.check_rows()


@pytest.mark.parametrize(
    "dtype, with_sinks", [("float32", True), ("bfloat16", False)], ids=["sinks", "plain"]
)
def test_compiled_kernels(dtype, with_sinks):
    sinks = np.array([0.5, -np.inf, 3.0, -2.0], "f4") if with_sinks else None
    kernels = compiled_kernels(dtype, kind="mla_sliding", sink_logits=with_sinks)
    pair = make_pair((9, 9), kernels, sinks, dtype=dtype)
    pair.add(0, 1)
    for chunking in ("chunks", "one by one"):
        for step in CHUNKINGS[chunking][:10]:
            pair.step(*step)
    pair.check_rows()


def make_config(window: int | None, **fields) -> pkv.KVCacheConfig:
    sliding = pkv.LayerSpec(
        "mla", window, mla_original_qk_head_dim=QK_DIM, mla_original_v_head_dim=V_DIM
    )
    return pkv.KVCacheConfig(
        num_layers=NUM_LAYERS,
        num_qo_heads=HEADS,
        num_kv_heads=HEADS,
        qk_head_dim=CKV + KPE,
        v_head_dim=CKV,
        dtype="float32",
        page_size=4,
        max_num_sequences=2,
        max_total_tokens=1024,
        prefill_chunk_size=64,
        layers=[sliding] * NUM_LAYERS,
        **fields,
    )


def test_a_cache_from_a_configuration():
    config = make_config(7)
    cache = pkv.create(config)
    assert cache.stats()["allocated_bytes"] == config.memory_bytes()
    assert config.memory_bytes() < make_config(None).memory_bytes() / 2
    pair = MLAPair(cache)
    pair.add(0, 1)
    pair.step([0, 1], [5, 40], "prefill")
    pair.step([1, 0], [30, 1], "extend")
    for _ in range(4):
        pair.step([0, 1], [20, 20], "extend")
        pair.step([1, 0], [1, 1], "decode")
    group = cache.stats()["groups"][0]
    assert (group["window"], cache.description["layers"][0]["kind"]) == (7, "mla")
    assert len(cache.page_table(0)) <= (7 + 16) // 4 + 2 < cache.sequence_length(0) // 4
    assert "2 x mla window=7" in cache.description["layout"]
    pair.check_rows()


def test_forks_and_pops():
    pair = make_pair((6, 6))
    pair.add(0)
    pair.step([0], [32], "prefill")
    pair.step([0], [28], "extend")
    first = pair.cache.first_position(0)
    assert first == 36  # the page of what is seen behind a pop of 16 positions, from 39 on
    pair.fork(0, 1)
    pair.fork(0, 2, first + 7)
    pair.step([2, 0, 1], [1, 2, 9], "extend")
    pair.pop(0, 16)
    pair.step([0, 2], [1, 1], "decode")
    pair.pop(1, pair.cache.sequence_length(1) - 30)  # pages that the window left are cached
    pair.step([1, 0], [3, 1], "extend")
    pair.check_rows()


def test_a_pop_to_pages_that_are_gone_changes_nothing():
    pair = make_pair((6, 6), max_total_tokens=48, max_num_sequences=1, prefill_chunk_size=8)
    pair.add(0)
    for _ in range(8):
        pair.step([0], [8], "extend")
    before = snapshot(pair.cache, [0])
    with pytest.raises(ValueError, match="have been reclaimed"):
        pair.cache.pop_n(0, 50)
    assert snapshot(pair.cache, [0]) == before
    pair.pop(0, 16)
    pair.step([0], [3], "extend")


def test_a_prefix_hit_needs_the_last_window_only():
    pair = make_pair((6, 0))
    prompt = list(range(40))
    pair.add(0)
    pair.step([0], [32], "prefill")
    pair.step([0], [8], "extend")
    pair.cache.record_tokens(0, prompt)
    pair.expected.fork_sequence(0, 1, 39)
    pair.remove(0)
    assert pair.cache.add_sequence(1, prompt) == 39
    pair.step([1], [1], "decode")
    pair.step([1], [5], "extend")
    pair.check_rows()


def test_token_trees_of_compiled_kernels():
    """Rows see their ancestors among the last positions; then the tree is committed."""
    print("seed 0")
    window, scale = 5, 0.3
    layers = [{**MLA_LAYER, "window": window}]
    kernels = compiled_kernels("float32", kind="mla_sliding")
    cache = make_mla_cache(kernels, layers=layers)
    expected = reference.ReferenceLatentCache(1, np.dtype("float32"), windows=[window])
    rng = np.random.default_rng(0)
    for each in (cache, expected):
        each.add_sequence(0)

    def step(num_rows: int, parents=None):
        latent = rng.standard_normal((num_rows, CKV + KPE)).astype("f4")
        q = rng.standard_normal((num_rows, HEADS, CKV + KPE)).astype("f4")
        expected.append(0, [0], [num_rows], latent)
        if parents is not None:
            expected.grow_trees([0], [num_rows], parents)
        with cache.forward([0], [num_rows], parents):
            cache.append_mla_kv(0, latent)
            is_whole = parents is not None or num_rows == 1
            if is_whole:
                found = cache.cross_attention(0, q, scale)
                wanted = expected.absorbed(0, [0], [num_rows], q, CKV, scale)
                reference.assert_state_close([x.numpy() for x in found], wanted, "float32")

    step(11)
    step(5, [-1, 0, 0, 2, 3])
    step(3, [4, 1, -1])
    cache.commit_tree([0], [5])
    expected.commit_tree(0, 5)
    step(1)
    np.testing.assert_array_equal(
        cache.debug_get_kv_mla(0, cache.first_position(0)).numpy()[0],
        expected.latent(0, 0)[cache.first_position(0) :],
    )


def test_what_is_refused():
    for fields, text in (
        ({"kind": "mha"}, "invalid otherwise, except for 'mla'"),
        ({"kind": "index"}, "invalid otherwise, except for 'mla'"),
        ({"kind": "mla", "lists": True}, "for layers that keep all positions; got window=8"),
    ):
        with pytest.raises(ValueError, match=text):
            pkv.LayerSpec(window=8, **fields)
    with pytest.raises(ValueError, match="layer.window"):
        pkv.LayerSpec("mla", window=0)
    with pytest.raises(ValueError, match="sliding_window is not possible with MLA layers"):
        make_config(7, sliding_window=True)
    layers = [{**MLA_LAYER, "window": 6}]
    with pytest.raises(ValueError, match="missing: mla_prefill_sliding"):
        make_cache([{**MLA_KERNELS, "mla_prefill_sliding": None}], layers=layers)
    for name in ("mla_prefill_sliding", "mla_tree_sliding"):
        kernels = {**MLA_KERNELS_WITH_TREES, name: ["tirx", MLA_KERNELS_WITH_TREES[name]]}
        with pytest.raises(ValueError, match=f"its kernel '{name}' is of the stock cache"):
            make_cache([kernels], layers=layers)
    with pytest.raises(ValueError, match="window must be between 1 and"):
        make_cache([MLA_KERNELS], layers=[{**MLA_LAYER, "window": -1}])


def test_trees_need_their_kernel():
    cache = make_cache([MLA_KERNELS], layers=[{**MLA_LAYER, "window": 6}])
    cache.add_sequence(0)
    with permissive_step(cache, [0], [3]):
        pass
    with pytest.raises(ValueError, match="no kernel 'mla_tree_sliding'"):
        cache.begin_forward([0], [2], [-1, -1])


if __name__ == "__main__":
    import tvm.testing

    tvm.testing.main()
