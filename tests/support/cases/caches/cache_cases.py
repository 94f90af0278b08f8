# SPDX-License-Identifier: Apache-2.0
"""A cache over NumPy kernels and its reference, driven alike through sequences and steps."""

from __future__ import annotations

import numpy as np

import tvm_pagedkv as pkv

from .... import reference
from ...emulators.python_kernels import LAYER, poison

NUM_QO_HEADS, NUM_KV_HEADS, DIM = LAYER["num_qo_heads"], LAYER["num_kv_heads"], LAYER["qk_head_dim"]
HEADS = NUM_QO_HEADS + 2 * NUM_KV_HEADS  # of a row with Q, K and V
ROPE = reference.Rope(rotary_dim=DIM)
MODES = {"none": 0, "normal": 1, "inline": 2}


def layer_of(window: int, **fields) -> dict:
    """A layer with a window; 0: without one; -n: with chunks of n positions."""
    name = "mha_sliding" if window > 0 else "mha_chunked"
    kind = {"kind": name, "window": abs(window)} if window else {}
    return {**LAYER, **kind, **fields}


def small_hybrid(checkpoint_tokens: int, **options) -> pkv.KVCacheConfig:
    """Describe a recurrent layer and one of attention, with one head of 8 columns each."""
    recurrent = pkv.RecurrentConfig("mamba2", 1, 1, 8, 8, checkpoint_tokens=checkpoint_tokens)
    return pkv.KVCacheConfig(
        num_layers=2,
        num_qo_heads=1,
        num_kv_heads=1,
        qk_head_dim=8,
        page_size=4,
        dtype="float32",
        layers=[pkv.LayerSpec("recurrent", recurrent=recurrent), pkv.LayerSpec()],
        rope=pkv.RopeConfig(mode="none"),
        **options,
    )


def reserved_bytes(cache: pkv.KVCache) -> int:
    """Return what a cache has allocated, without what its kernels borrow: that comes with steps."""
    stats = cache.stats()
    return stats["allocated_bytes"] - stats["scratch_bytes"]


class CachePair:
    """A cache and its reference."""

    def __init__(self, cache: pkv.KVCache, expected: reference.ReferenceCache, seed: int = 0):
        self.cache, self.expected = cache, expected
        self.dtype = cache.description["dtype"]
        self.rng = np.random.default_rng(seed)

    def add(self, *seq_ids: int) -> None:
        for seq_id in seq_ids:
            self.cache.add_sequence(seq_id)
            self.expected.add_sequence(seq_id)

    def fork(self, parent: int, child: int, position: int = -1) -> None:
        self.cache.fork_sequence(parent, child, position)
        self.expected.fork_sequence(parent, child, position)

    def pop(self, seq_id: int, n: int) -> None:
        self.cache.pop_n(seq_id, n)
        self.expected.pop_n(seq_id, n)

    def remove(self, seq_id: int) -> None:
        self.cache.remove_sequence(seq_id)
        self.expected.remove_sequence(seq_id)

    def normal(self, *shape: int) -> np.ndarray:
        return self.rng.standard_normal(shape).astype(self.dtype)

    def qkv(self, num_rows: int) -> np.ndarray:
        return self.normal(num_rows, HEADS, DIM)

    def whole(self, layer: int, seq_ids, lengths, qkv, sinks=None):
        """Append to a layer of the reference and return its `(o, lse)`."""
        scale = DIM**-0.5
        return self.expected.attention(layer, seq_ids, lengths, qkv, NUM_KV_HEADS, scale, sinks)

    def attend(self, layer: int, seq_ids, lengths) -> None:
        """Attend in a layer and compare; call it within a step."""
        qkv = self.qkv(sum(lengths))
        out = self.cache.attention(layer, qkv).numpy()
        o, _ = self.whole(layer, seq_ids, lengths, qkv)
        reference.assert_close(out, o, self.dtype, f"layer {layer} of {seq_ids} {lengths}")

    def attend_in_parts(self, layer: int, seq_ids, lengths, qkv) -> None:
        """Merge self and cross attention of a layer and compare; call it within a step."""
        q, k, v = np.split(qkv, [NUM_QO_HEADS, NUM_QO_HEADS + NUM_KV_HEADS], axis=1)
        parts = self.cache.self_attention(layer, q, k, v)
        poison(self.cache)
        merged = self.cache.merge_attention(*parts, *self.cache.cross_attention(layer, q))
        o, lse = self.whole(layer, seq_ids, lengths, qkv)
        merged = [x.numpy() for x in merged]
        reference.assert_state_close(merged, (o, lse), self.dtype, what="merged")

    def step(self, seq_ids: list[int], lengths: list[int]) -> None:
        with self.cache.forward(seq_ids, lengths):
            for layer in range(self.expected.num_layers):
                self.attend(layer, seq_ids, lengths)
            self.cache.check_integrity()
        self.cache.check_integrity()
        poison(self.cache)

    def num_pages(self, seq_id: int, group: int = 0) -> int:
        return len(self.cache.page_table(seq_id, group))


class PlainPair(CachePair):
    """Two layers without a window."""

    def __init__(self, cache: pkv.KVCache, mode: str = "none", seed: int = 0):
        dtype = np.dtype(cache.description["kv_dtype"])
        super().__init__(cache, reference.ReferenceCache(2, dtype, ROPE, mode), seed)

    def check_rows(self) -> None:
        for seq_id in self.expected.sequences:
            k, v = (x.numpy() for x in self.cache.debug_get_kv(seq_id))
            for layer in range(self.expected.num_layers):
                rows = self.expected.kv(seq_id, layer)
                if rows is not None:
                    reference.assert_close(k[layer], rows[0], self.dtype, f"K of {seq_id}")
                    reference.assert_close(v[layer], rows[1], self.dtype, f"V of {seq_id}")
