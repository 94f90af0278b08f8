# SPDX-License-Identifier: Apache-2.0
"""Windows of sequences beside recurrent layers: attention forgets tokens, states do not."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import tvm.testing

import tvm_pagedkv as pkv

from ...support.cases.caches.cache_cases import reserved_bytes, small_hybrid
from ...support.worlds.recurrent_world import World


@pytest.mark.parametrize(
    ("seed", "history"), [(0, None), pytest.param(1, 0, marks=pytest.mark.slow)]
)
def test_random_operations(seed, history):
    print(f"seed {seed}")
    world = World(seed, "float32", checkpoint_tokens=8, history_tokens=history, sliding_window=True)
    for _ in range(600):
        world.do()
    print(world.counts)
    for name in ("steps", "aborts", "forks", "pops", "windows"):
        assert world.counts[name] > 8, name
    assert reserved_bytes(world.cache) == world.config.memory_bytes()


@pytest.mark.parametrize("mode", ["normal", "inline"])
def test_attention_is_that_of_a_cache_without_recurrent_layers(mode):
    """And states are those of a sequence without a window, bit for bit."""
    recurrent = pkv.RecurrentConfig("gated_delta", 2, 1, 16, 16, checkpoint_tokens=16)
    layers = [pkv.LayerSpec("recurrent", recurrent=recurrent), pkv.LayerSpec()]
    config = pkv.KVCacheConfig(
        num_layers=2,
        num_qo_heads=2,
        num_kv_heads=1,
        qk_head_dim=16,
        page_size=4,
        dtype="float32",
        max_num_sequences=2,
        max_total_tokens=256,
        prefill_chunk_size=64,
        layers=layers,
        rope=pkv.RopeConfig(mode=mode),
        sliding_window=True,
    )
    hybrid = pkv.create(config)
    attention = pkv.create(replace(config, layers=[pkv.LayerSpec("linear"), pkv.LayerSpec()]))
    rng = np.random.default_rng(0)
    for cache in (hybrid, attention):
        cache.add_sequence(0)
    hybrid.add_sequence(1)
    hybrid.enable_sliding_window(0, 24, 3)
    attention.enable_sliding_window(0, 24, 3)

    def step(count: int) -> None:
        qkv = rng.standard_normal((count, 4, 16)).astype("float32")
        q, k = rng.standard_normal((2, count, 1, 16)).astype("float32")
        k /= np.linalg.norm(k, axis=-1, keepdims=True)
        v = rng.standard_normal((count, 2, 16)).astype("float32")
        gates = rng.uniform(0, 1, (count, 2)).astype("float32")
        with hybrid.forward([0, 1], [count, count]):
            rows = (np.concatenate([x, x]) for x in (q, k, v, -gates, gates))
            o = hybrid.recurrent(0, *rows).numpy()
            found = hybrid.attention(1, np.concatenate([qkv, qkv])).numpy()[:count]
        with attention.forward([0], [count]):
            expected = attention.attention(1, qkv).numpy()
        assert np.array_equal(o[:count], o[count:])
        tvm.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)

    for count in (20, 1, 9, 1, 30, 2):
        step(count)
    for seq_id, cache in ((0, hybrid), (0, attention), (1, hybrid)):
        cache.pop_n(seq_id, 5)
    for count in (1, 7):
        step(count)
    assert hybrid.sequence_length(0) == attention.sequence_length(0) < hybrid.sequence_length(1)
    for seq_id in (0, 1):
        hybrid.fork_sequence(seq_id, seq_id + 2, hybrid.sequence_length(seq_id) - 3)
        hybrid.remove_sequence(seq_id)
        hybrid.fork_sequence(seq_id + 2, seq_id)
        hybrid.remove_sequence(seq_id + 2)
    attention.pop_n(0, 3)  # a fork has no window yet
    hybrid.enable_sliding_window(0, 24, 3)
    for count in (1, 9):
        step(count)
    hybrid.check_integrity()


def test_a_long_text_needs_the_pages_of_its_window():
    """Attention keeps 24 positions; ingredients reach back to a state, and are as many always."""
    config = small_hybrid(
        checkpoint_tokens=64,
        max_num_sequences=1,
        max_total_tokens=40,
        prefill_chunk_size=16,
        sliding_window=True,
    )
    cache = pkv.create(config)
    cache.add_sequence(0)
    cache.enable_sliding_window(0, 24, 4)
    rows, decays = np.ones((16, 1, 8), "float32"), np.full((16, 1), -1e-3, "float32")
    for chunk in range(40):
        with cache.forward([0], [16]):
            o = cache.recurrent(0, rows, rows, rows, decays, scale=1.0).numpy()
            cache.attention(1, np.zeros((16, 3, 8), "float32"))
        n = 16 * (chunk + 1)
        expected = 8 * (1 - np.exp(-1e-3 * n)) / (1 - np.exp(-1e-3))
        tvm.testing.assert_allclose(o[-1], np.full((1, 8), expected), rtol=1e-4)
    cache.pop_n(0, 16)
    cache.check_integrity()
    assert reserved_bytes(cache) == config.memory_bytes()


if __name__ == "__main__":
    tvm.testing.main()
