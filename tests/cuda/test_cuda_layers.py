# SPDX-License-Identifier: Apache-2.0
"""Kernels for GPUs under the cache, on the emulated device: kinds of layers, windows, dtypes."""

from __future__ import annotations

import numpy as np
import pytest

import tvm_pagedkv as pkv

from .. import reference
from ..support.cases.caches.cache_cases import DIM, NUM_KV_HEADS, NUM_QO_HEADS, PlainPair
from ..support.cases.caches.mla_cache_cases import CKV, KPE, QK_DIM, V_DIM, MLAPair
from ..support.cases.caches.mla_cache_cases import HEADS as MLA_HEADS
from ..support.cases.caches.sequence_window_cases import WindowPair
from ..support.emulators.python_kernels import shuffle
from ..support.harness.selections import few_of


def make_cache(device, layers: list[pkv.LayerSpec], **fields) -> pkv.KVCache:
    room = {"page_size": 4, "max_num_sequences": 4, "max_total_tokens": 256}
    config = pkv.KVCacheConfig(
        num_layers=len(layers), num_qo_heads=NUM_QO_HEADS, num_kv_heads=NUM_KV_HEADS,
        qk_head_dim=DIM, layers=layers, prefill_chunk_size=40, **room, **fields,
    )  # fmt: skip
    cache = pkv.create(config, device=device.device)
    shuffle(cache, 1)
    return cache


def test_latent_layers(device):
    layer = pkv.LayerSpec(
        "mla", num_qo_heads=MLA_HEADS, num_kv_heads=1, qk_head_dim=CKV + KPE, v_head_dim=CKV,
        mla_original_qk_head_dim=QK_DIM, mla_original_v_head_dim=V_DIM,
    )  # fmt: skip
    pair = MLAPair(make_cache(device, [layer] * 2, dtype="float16"))
    pair.add(0, 1)
    pair.step([0, 1], [9, 5], "prefill")
    pair.step([1, 0], [6, 1], "extend")
    pair.fork(0, 2, 7)
    pair.pop(1, 3)
    pair.step([2, 0, 1], [1, 1, 1], "decode")
    pair.step([2, 0], [1, 1], "extend")
    pair.check_rows()


@pytest.mark.parametrize("windows", few_of([(0, 6), (0,)], 1), ids=["mixed", "plain"])
def test_windows_of_sequences(device, windows):
    layers = [
        pkv.LayerSpec("mha_sliding", window=each) if each else pkv.LayerSpec("mha")
        for each in windows
    ]
    rope = pkv.RopeConfig(mode="inline")
    cache = make_cache(device, layers, dtype="float32", sliding_window=True, rope=rope)
    pair = WindowPair(windows, cache=cache)
    pair.add(0, 12, 3)
    pair.add(1)
    for lengths in ([13, 2], [1, 18], [1, 1], [7, 1]):
        pair.step([0, 1], lengths)
    pair.cache.fork_sequence(0, 2)
    pair.expected.fork_sequence(0, 2, -1)
    pair.enable(1, 9, 2)
    pair.pop(1, 2)
    pair.step([2, 1, 0], [2, 1, 1])


def test_every_call_of_a_layer(device):
    """Sinks, parts and their merge, K and V that another layer shares; forks and pops."""
    pair = PlainPair(make_cache(device, [pkv.LayerSpec("mha")] * 2, dtype="bfloat16"), "normal")
    pair.add(0, 1)
    pair.step([0, 1], [11, 6])
    pair.fork(0, 2, 9)
    sinks = pair.rng.standard_normal(NUM_QO_HEADS).astype("f4")
    for seq_ids, lengths in (([2, 0], [1, 1]), ([1, 2], [3, 4])):
        with pair.cache.forward(seq_ids, lengths):
            for layer in range(2):
                qkv = pair.qkv(sum(lengths))
                out = pair.cache.attention(layer, qkv, sink_logits=sinks)
                o, _ = pair.whole(layer, seq_ids, lengths, qkv, sinks)
                reference.assert_close(out.numpy(), o, pair.dtype, f"layer {layer}")
    pair.pop(1, 2)
    pair.step([1, 0], [2, 1])
    pair.check_rows()


def test_parts_of_a_step(device):
    rope = pkv.RopeConfig(mode="none")
    layers = [pkv.LayerSpec("mha")] * 2
    pair = PlainPair(make_cache(device, layers, dtype="float16", rope=rope))
    pair.add(0, 1)
    for lengths in ([7, 3], [2, 4], [1, 1]):
        with pair.cache.forward([0, 1], lengths):
            for layer in range(2):
                qkv = pair.qkv(sum(lengths))
                pair.attend_in_parts(layer, [0, 1], lengths, qkv)
                q, k, v = np.split(qkv, [NUM_QO_HEADS, NUM_QO_HEADS + NUM_KV_HEADS], axis=1)
                shared = pair.cache.attention_with_shared_kv(layer, q, k, v)
                again = pair.cache.attention(layer, qkv)
                reference.assert_close(shared.numpy(), again.numpy(), pair.dtype, "shared K and V")
    pair.check_rows()


if __name__ == "__main__":
    import tvm.testing

    tvm.testing.main()
