# SPDX-License-Identifier: Apache-2.0
"""Layers whose rows of K and of V have two widths: steps, forks, trees, checkpoints, refusals."""

from __future__ import annotations

import numpy as np
import pytest

import tvm_pagedkv as pkv
from tvm_pagedkv.cache.page_format import PageFormat

from ... import reference
from ...support.cases.caches.cache_cases import CachePair, reserved_bytes
from ...support.cases.kernels import two_widths
from ...support.emulators.python_kernels import LAYER, make_cache

NUM_QO_HEADS, NUM_KV_HEADS, QK_DIM, V_DIM = 4, 2, 24, 16


def config_of(**fields) -> pkv.KVCacheConfig:
    return pkv.KVCacheConfig(
        **{
            "num_layers": 1,
            "num_qo_heads": NUM_QO_HEADS,
            "num_kv_heads": NUM_KV_HEADS,
            "qk_head_dim": QK_DIM,
            "v_head_dim": V_DIM,
            "dtype": "float32",
            "max_num_sequences": 4,
            "max_total_tokens": 512,
            "prefill_chunk_size": 64,
            "page_size": 8,
            **fields,
        }
    )


class Pair(CachePair):
    """A cache of such layers; the reference pads V with zeros."""

    def __init__(self, config: pkv.KVCacheConfig, seed: int = 0):
        resolved = config.resolved()
        windows = [layer.window for layer in resolved.layers]
        rope = reference.Rope(rotary_dim=QK_DIM)
        mode = resolved.layers[0].rope.mode
        expected = reference.ReferenceCache(len(windows), np.dtype("float32"), rope, mode, windows)
        super().__init__(pkv.create(config), expected, seed)

    def rows(self, num_rows: int):
        heads = (NUM_QO_HEADS, QK_DIM), (NUM_KV_HEADS, QK_DIM), (NUM_KV_HEADS, V_DIM)
        return [self.normal(num_rows, *shape) for shape in heads]

    def want(self, layer: int, seq_ids, lengths, q, k, v):
        padding = np.zeros((*v.shape[:2], QK_DIM - V_DIM), v.dtype)
        qkv = np.concatenate([q, k, np.concatenate([v, padding], axis=-1)], axis=1)
        o, lse = self.expected.attention(layer, seq_ids, lengths, qkv, NUM_KV_HEADS, QK_DIM**-0.5)
        return o[..., :V_DIM], lse

    def attend(self, layer: int, seq_ids, lengths) -> None:
        rows = self.rows(sum(lengths))
        out = self.cache.attention(layer, two_widths.fused(*rows)).numpy()
        o, _ = self.want(layer, seq_ids, lengths, *rows)
        reference.assert_close(out, o, self.dtype, f"layer {layer} of {seq_ids} {lengths}")

    def step_in_parts(self, seq_ids, lengths) -> None:
        with self.cache.forward(seq_ids, lengths):
            for layer in range(self.expected.num_layers):
                q, k, v = self.rows(sum(lengths))
                parts = self.cache.self_attention(layer, q, k, v)
                merged = self.cache.merge_attention(*parts, *self.cache.cross_attention(layer, q))
                want = self.want(layer, seq_ids, lengths, q, k, v)
                reference.assert_state_close([x.numpy() for x in merged], want, self.dtype)

    def check_rows(self) -> None:
        for seq_id in self.expected.sequences:
            k, v = (x.numpy() for x in self.cache.debug_get_kv(seq_id))
            for layer in range(self.expected.num_layers):
                want_k, want_v = self.expected.kv(seq_id, layer)
                reference.assert_close(k[layer], want_k, self.dtype)
                reference.assert_same_bits(v[layer], np.ascontiguousarray(want_v[..., :V_DIM]))


SLIDING = [pkv.LayerSpec(), pkv.LayerSpec("mha_sliding", window=11)]


@pytest.mark.parametrize(
    "mode, fields",
    [
        ("normal", {}),
        pytest.param("inline", {}, marks=pytest.mark.slow),
        pytest.param("none", {"num_layers": 2, "layers": SLIDING}, marks=pytest.mark.slow),
    ],
    ids=["normal", "inline", "sliding"],
)
def test_steps_agree_with_the_reference(mode, fields, tmp_path):
    config = config_of(rope=pkv.RopeConfig(mode=mode), **fields)
    pair = Pair(config)
    pair.add(0, 1)
    pair.step([0, 1], [13, 40])
    pair.step([1, 0], [1, 1])
    pair.fork(1, 2, 21)
    pair.pop(1, 5)
    pair.step([2, 0, 1], [5, 1, 9])
    pair.step([0, 1, 2], [1, 1, 1])
    assert reserved_bytes(pair.cache) == config.memory_bytes()
    if not fields:
        pair.check_rows()
        parents = [-1, 0, 0, 1, 2]
        with pair.cache.forward([0], [5], parents):
            pair.expected.grow_trees([0], [5], parents)
            pair.attend(0, [0], [5])
        pair.cache.commit_tree([0], [4])
        pair.expected.commit_tree(0, 4)
        pair.step([0], [2])
        pair.check_rows()
    if mode == "none":
        pair.step_in_parts([0, 1], [3, 7])
    pair.cache.save(tmp_path / "one", [1])
    pair.remove(2)
    pair.cache.load(tmp_path / "one", {1: 2})
    pair.expected.fork_sequence(1, 2)
    pair.step([2], [1])
    with pytest.raises(ValueError, match="layer 0: pages whose rows of K and V have two widths"):
        PageFormat.of(pair.cache, 0, "float16")


def test_a_step_refuses_rows_of_one_width():
    with pytest.raises(ValueError, match="qkv"):
        cache = pkv.create(config_of(rope=pkv.RopeConfig(mode="normal")))
        cache.add_sequence(0)
        with cache.forward([0], [2]):
            cache.attention(0, np.zeros((2, 8, QK_DIM), "float32"))


def test_quantized_pages_have_one_width():
    with pytest.raises(ValueError, match="layer 0: quantized pages keep K and V rows of one width"):
        config_of(kv_dtype="int8").resolved()


def test_lists_need_one_width():
    with pytest.raises(ValueError, match="layer 0: attention to lists needs rows of K and V of on"):
        config_of(layers=[pkv.LayerSpec(lists=True)]).resolved()


def test_kernels_of_the_stock_cache_have_one_width():
    def kernel(*args):
        raise AssertionError("not called")

    with pytest.raises(ValueError, match="which only kernels of tvm_pagedkv can read in pages"):
        make_cache({"prefill": ["tirx", kernel]}, layers=[{**LAYER, "v_head_dim": 16}])
