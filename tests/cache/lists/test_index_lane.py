# SPDX-License-Identifier: Apache-2.0
"""Index lanes of a cache: keys go where K and V go, and choose what rows attend to."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import tvm

import tvm_pagedkv as pkv
from tir_kernels.codec import codec_of
from tvm_pagedkv import LayerSpec

from ... import reference
from ...reference import quantized
from ...reference.index import assert_chosen, index_scores
from ...reference.listed import listed_attention
from .test_lists import HEADS, KV_HEADS, LISTS, WIDTH

INDEX_HEADS, INDEX_DIM, K = 3, 16, 6
SLOW = pytest.mark.slow
KV, INDEX = 0, 1
CONFIG = replace(
    LISTS,
    num_layers=2,
    rope=pkv.RopeConfig(mode="none"),
    layers=[
        LayerSpec(lists=True),
        LayerSpec("index", num_qo_heads=INDEX_HEADS, qk_head_dim=INDEX_DIM),
    ],
)


def with_lane(**fields) -> pkv.KVCacheConfig:
    """The configuration with other fields of its index lane."""
    return replace(CONFIG, layers=[CONFIG.layers[0], replace(CONFIG.layers[1], **fields)])


def kept_keys(keys: np.ndarray, kv_dtype: str | None) -> np.ndarray:
    """Keys as a lane gives them back."""
    if kv_dtype is None:
        return keys
    return quantized.keep(codec_of(kv_dtype), keys, keys.shape[-1])


class World:
    """A cache and its reference; what a token appends is a function of the token."""

    def __init__(self, seed: int, kv_dtype: str | None = None):
        self.rng = np.random.default_rng(seed)
        self.config = with_lane(kv_dtype=kv_dtype)
        self.cache = pkv.create(self.config)
        self.texts: dict[int, list[int]] = {}
        self.qkv = self.normal(1000, HEADS + 2 * KV_HEADS, WIDTH)
        self.keys = self.normal(1000, INDEX_DIM)
        self.kept = kept_keys(self.keys, kv_dtype)

    def normal(self, *shape: int) -> np.ndarray:
        return self.rng.standard_normal(shape).astype("float32")

    def add(self, seq_id: int, text: list[int]) -> int:
        reused = self.cache.add_sequence(seq_id, text)
        self.texts[seq_id] = text[:reused]
        return reused

    def attend(self, tokens: list[int]):
        """Append the rows of tokens, and return Q, its weights, positions and O."""
        q, weights = (
            self.normal(len(tokens), INDEX_HEADS, INDEX_DIM),
            self.normal(len(tokens), INDEX_HEADS),
        )
        self.cache.append_index(INDEX, self.keys[tokens])
        positions = self.cache.index_top_k(INDEX, q, weights, K, 0.5)
        o = self.cache.attention(KV, self.qkv[tokens], 0.25, positions=positions)
        return q, weights, positions.numpy(), o.numpy()

    def verify(self, seq_id: int, tokens, q, weights, positions, o) -> None:
        """Compare what `attend` gave for the last tokens of a text."""
        text = np.array(self.texts[seq_id])
        owns = range(len(text) - len(tokens), len(text))
        for row, own in enumerate(owns):
            keys = self.kept[text[: own + 1]]
            assert_chosen(positions[row], index_scores(q[row], weights[row], keys, 0.5), "float32")
        k, v = self.qkv[text, HEADS : HEADS + KV_HEADS], self.qkv[text, HEADS + KV_HEADS :]
        want, _ = listed_attention(self.qkv[tokens][:, :HEADS], k, v, positions, owns, 0.25)
        reference.assert_close(o, want, "float32", "o")

    def step(self, seq_ids: list[int], counts: list[int], records: bool = True) -> None:
        parts = [[int(t) for t in self.rng.integers(0, 1000, n)] for n in counts]
        tokens = sum(parts, [])
        with self.cache.forward(seq_ids, counts, tokens=tokens if records else None):
            results = self.attend(tokens)
        begin = 0
        for seq_id, part in zip(seq_ids, parts, strict=True):
            self.texts[seq_id] += part
            rows = [x[begin : begin + len(part)] for x in results]
            self.verify(seq_id, part, *rows)
            begin += len(part)
        self.cache.check_integrity()


@pytest.mark.parametrize("kv_dtype", [None, "int8", pytest.param("float8_e4m3fn", marks=SLOW)])
def test_keys_follow_forks_pops_hits_and_files(tmp_path, kv_dtype):
    seed = 2
    print(f"seed {seed}")
    world = World(seed, kv_dtype)
    cache, texts = world.cache, world.texts
    assert cache.stats()["allocated_bytes"] == world.config.memory_bytes()
    world.add(0, [1])
    world.step([0], [45])
    for child, position in ((1, 30), (2, -1), (3, 7)):
        cache.fork_sequence(0, child, position)
        texts[child] = texts[0][: None if position < 0 else position]
    world.step([3, 0, 1, 2], [1, 1, 5, 1])
    cache.pop_n(0, 11)
    del texts[0][-11:]
    world.step([0, 1], [3, 1])
    text = list(texts[0])
    cache.save(tmp_path / "file", [0])
    cache.remove_sequence(0)
    reused = world.add(4, [*text, 5])  # found in the prefix cache
    assert reused >= len(text) - 4
    world.step([4], [2])
    other = World(seed, kv_dtype)  # the same tokens append the same rows
    other.cache.load(tmp_path / "file", [0])
    other.texts[0] = text
    other.step([0], [1], records=False)
    other.step([0], [4], records=False)


def test_keys_follow_the_commit_of_a_tree():
    world = World(5)
    cache = world.cache
    world.add(0, [1])
    world.step([0], [21])
    tokens = [100, 101, 102, 103]
    with cache.forward([0], [4], token_tree_parents=[-1, 0, 0, 2]):
        cache.append_index(INDEX, world.keys[tokens])
        cache.attention(KV, world.qkv[tokens])
        q = world.normal(4, INDEX_HEADS, INDEX_DIM)
        with pytest.raises(ValueError, match="token trees branch"):
            cache.index_top_k(INDEX, q, q[..., 0].copy(), K)
    cache.commit_tree([0], [3])
    world.texts[0] += [100, 102, 103]
    with cache.forward([0], [2]):
        results = world.attend([7, 8])
    world.texts[0] += [7, 8]
    world.verify(0, [7, 8], *results)


def test_errors():
    world = World(0)
    cache = world.cache
    world.add(0, [1])
    q, weights = world.normal(2, INDEX_HEADS, INDEX_DIM), world.normal(2, INDEX_HEADS)
    with cache.forward([0], [2]):
        with pytest.raises(ValueError, match="has not appended this step's index keys"):
            cache.index_top_k(INDEX, q, weights, K)
        cache.append_index(INDEX, world.keys[:2])
        cache.attention(KV, world.qkv[:2])
        with pytest.raises(ValueError, match="layer 0 is no index lane"):
            cache.index_top_k(KV, q, weights, K)
        with pytest.raises(ValueError, match="weights must"):
            cache.index_top_k(INDEX, q, weights[:, :2].copy(), K)
        with pytest.raises(ValueError, match="k must be"):
            cache.index_top_k(INDEX, q, weights, 0)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"qk_head_dim": None}, "kind 'index' needs num_qo_heads and qk_head_dim of its own"),
        ({"kv_dtype": "int4"}, "index keys are kept as float32, float16, bfloat16, int8 or"),
        ({"kv_dtype": ("int8", "float8_e4m3fn")}, "index keys are kept as"),
        ({"num_kv_heads": 2}, "num_kv_heads of kind 'index' must be 1"),
        ({"window": 3}, "layer.window is required for kinds 'mha_sliding' and"),
    ],
)
def test_lanes_that_cannot_be(fields, message):
    lane = {"kind": "index", "num_qo_heads": 4, "qk_head_dim": 16, **fields}
    with pytest.raises(ValueError, match=message):
        replace(CONFIG, layers=[LayerSpec(), LayerSpec(**lane)])


@pytest.mark.parametrize(
    ("kv_dtype", "least"), [("int8", 0.97), pytest.param("float8_e4m3fn", 0.9, marks=SLOW)]
)
def test_most_positions_are_those_of_exact_keys(kv_dtype, least):
    """The choice by keys with a scale each, beside that by keys in float32."""
    dim, k, rows = 128, 64, 3000
    rng, chosen = np.random.default_rng(0), []
    keys = rng.standard_normal((rows, dim)).astype("float32")
    keys *= rng.lognormal(size=(rows, 1)).astype("float32")  # so that scales differ
    q = rng.standard_normal((8, INDEX_HEADS, dim)).astype("float32")
    weights = rng.standard_normal((8, INDEX_HEADS)).astype("float32")
    scores = [index_scores(q[i], weights[i], keys[: rows - 7 + i], dim**-0.5) for i in range(8)]
    config = replace(with_lane(kv_dtype=kv_dtype, qk_head_dim=dim), max_total_tokens=4096)
    cache = pkv.create(replace(config, prefill_chunk_size=4096))
    cache.add_sequence(0)
    for part in (slice(0, rows - 8), slice(rows - 8, rows)):
        count = part.stop - part.start
        with cache.forward([0], [count]):
            cache.append_index(INDEX, keys[part])
            cache.attention(KV, np.zeros((count, HEADS + 2 * KV_HEADS, WIDTH), "float32"))
            if count == 8:
                chosen = cache.index_top_k(INDEX, q, weights, k, dim**-0.5).numpy()
    best = [np.argsort(-each, kind="stable")[:k] for each in scores]
    found = [len(np.intersect1d(*pair)) for pair in zip(chosen, best, strict=True)]
    assert least <= np.sum(found) / (8 * k) < 1


def test_merges_have_the_kernel_of_a_layer_with_attention():
    """A lane before it has the same heads and width."""
    lane = LayerSpec("index", num_qo_heads=HEADS, qk_head_dim=WIDTH)
    cache = pkv.create(replace(CONFIG, layers=[lane, LayerSpec()]))
    rng = np.random.default_rng(0)
    states = [
        (rng.standard_normal((5, HEADS, WIDTH)).astype("float32"),
         rng.standard_normal((5, HEADS)).astype("float32"))
        for _ in range(2)
    ]  # fmt: skip
    want = reference.merge(*states[0], *states[1])
    mine = [tvm.runtime.tensor(x) for x in states[0]]
    got = cache.merge_attention(*mine, *states[1])
    reference.assert_state_close([x.numpy() for x in got], want, "float32")
