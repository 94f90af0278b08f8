# SPDX-License-Identifier: Apache-2.0
"""Layers that attend to the K and V of another layer and append none of their own."""

from __future__ import annotations

import numpy as np
import pytest

import tvm_pagedkv as pkv

from ... import reference
from ...support.emulators.python_kernels import LAYER, make_cache, poison, shuffle
from ...support.worlds.permissive_steps import permissive_step

NUM_QO_HEADS, NUM_KV_HEADS, DIM = 4, 2, 8
ROPE = reference.Rope(rotary_dim=DIM)
MODES = {"none": 0, "normal": 1, "inline": 2}
STEPS = (([0, 1], [5, 9]), ([1, 0], [3, 1]), ([0, 1], [1, 1]))


def _check(cache: pkv.KVCache, mode: str, window: int | None = None) -> None:
    """Layer 0 appends; another layer's queries see what layer 0's own would have seen."""
    expected = reference.ReferenceCache(1, np.float32, ROPE, mode, [window])
    rng = np.random.default_rng(0)
    for seq_id in (0, 1):
        cache.add_sequence(seq_id)
        expected.add_sequence(seq_id)
    shuffle(cache, 1)
    for seq_ids, lengths in STEPS:
        shape = (sum(lengths), NUM_QO_HEADS + 2 * NUM_KV_HEADS, DIM)
        qkv = rng.standard_normal(shape).astype("float32")
        other = qkv.copy()  # the same K and V under other queries
        other[:, :NUM_QO_HEADS] = rng.standard_normal((len(qkv), NUM_QO_HEADS, DIM))
        positions = np.concatenate(
            [expected.length(s) + np.arange(n) for s, n in zip(seq_ids, lengths, strict=True)]
        )
        before = {s: expected.kv(s, 0) for s in seq_ids}
        own, _ = expected.attention(0, seq_ids, lengths, qkv, NUM_KV_HEADS, DIM**-0.5)
        after = {s: expected.kv(s, 0) for s in seq_ids}
        for seq_id, kv in before.items():
            expected.sequences[seq_id][0] = kv
        shared, _ = expected.attention(0, seq_ids, lengths, other, NUM_KV_HEADS, DIM**-0.5)
        for seq_id, kv in after.items():
            expected.sequences[seq_id][0] = kv

        q, k, v = np.split(other, [NUM_QO_HEADS, NUM_QO_HEADS + NUM_KV_HEADS], axis=1)
        if mode == "normal":  # the model rotates, as for every fine-grained call
            q, k = (reference.rotate(x, positions, ROPE).astype("float32") for x in (q, k))
        with cache.forward(seq_ids, lengths):
            with pytest.raises(ValueError, match="layer 0 has not appended"):
                cache.attention_with_shared_kv(0, q, k, v)
            reference.assert_close(cache.attention(0, qkv).numpy(), own, "float32", "source")
            out = cache.attention_with_shared_kv(0, q, k, v).numpy()
            reference.assert_close(out, shared, "float32", f"shared, lengths {lengths}")
            with pytest.raises(ValueError, match="q must have shape"):
                cache.attention_with_shared_kv(0, q[1:], k, v)
            with pytest.raises(ValueError, match="current_k must have shape"):
                cache.attention_with_shared_kv(0, q, q, v)
            with pytest.raises(IndexError, match="layer 7"):
                cache.attention_with_shared_kv(7, q, k, v, 1.0)
        poison(cache)
        cache.check_integrity()


@pytest.mark.parametrize("mode", list(MODES))
def test_over_numpy_kernels(mode):
    _check(make_cache(layers=[LAYER], rope_mode=MODES[mode]), mode)


@pytest.mark.parametrize("window", [None, 4])
@pytest.mark.parametrize("mode", ["normal", "inline"])
def test_over_compiled_kernels(mode, window):
    config = pkv.KVCacheConfig(
        num_layers=1,
        num_qo_heads=NUM_QO_HEADS,
        num_kv_heads=NUM_KV_HEADS,
        qk_head_dim=DIM,
        dtype="float32",
        page_size=4,
        max_total_tokens=64,
        prefill_chunk_size=32,
        rope=pkv.RopeConfig(mode=mode),
        layers=[pkv.LayerSpec("mha_sliding", window) if window else pkv.LayerSpec()],
    )
    _check(pkv.create(config), mode, window)


def test_mla_layers_share_nothing():
    config = pkv.KVCacheConfig(
        num_layers=1,
        num_qo_heads=2,
        num_kv_heads=1,
        qk_head_dim=16,
        v_head_dim=8,
        dtype="float32",
        max_total_tokens=64,
        prefill_chunk_size=32,
        rope=pkv.RopeConfig(mode="none"),
        layers=[pkv.LayerSpec("mla")],
    )
    cache = pkv.create(config)
    cache.add_sequence(0)
    rows = np.zeros((1, 2, 16), "float32")
    with permissive_step(cache, [0], [1]), pytest.raises(ValueError, match="MLA"):
        cache.attention_with_shared_kv(0, rows, rows, rows, 1.0)


if __name__ == "__main__":
    import tvm.testing

    tvm.testing.main()
