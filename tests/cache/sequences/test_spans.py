# SPDX-License-Identifier: Apache-2.0
"""Spans of a step whose rows see to the end of their span, over the compiled kernels."""

from __future__ import annotations

from dataclasses import replace

import ml_dtypes  # noqa: F401  (registers bfloat16 with NumPy)
import numpy as np
import pytest

import tvm_pagedkv as pkv

from ... import reference
from ...support.cases.caches.cache_cases import reserved_bytes
from ...support.harness.selections import with_slow

HEADS, KV_HEADS, DIM, WINDOW = 4, 2, 32, 40
LAYERS = {
    "global and sliding": [pkv.LayerSpec(), pkv.LayerSpec("mha_sliding", WINDOW)],
    "inline and chunked": [
        pkv.LayerSpec(rope=pkv.RopeConfig("inline")),
        pkv.LayerSpec("mha_chunked", 64, rope=pkv.RopeConfig("none")),
    ],
}


def config_of(layers=LAYERS["global and sliding"], **fields) -> pkv.KVCacheConfig:
    return pkv.KVCacheConfig(
        num_layers=len(layers), num_qo_heads=HEADS, num_kv_heads=KV_HEADS, qk_head_dim=DIM,
        layers=layers, max_num_sequences=4, max_total_tokens=2048, prefill_chunk_size=256,
        **{"dtype": "float32", "spans": True, **fields},
    )  # fmt: skip


class Model:
    """A cache, and for each layer the rows of each sequence and the spans that it has had."""

    def __init__(self, seed: int, config: pkv.KVCacheConfig):
        self.config, self.rng = config, np.random.default_rng(seed)
        self.cache, self.layers = pkv.create(config), config.resolved().layers
        self.texts: dict[int, list[np.ndarray]] = {}

    def add(self, seq_id: int) -> None:
        self.cache.add_sequence(seq_id)
        empty = np.zeros((0, HEADS + 2 * KV_HEADS, DIM), self.config.dtype)
        self.texts[seq_id] = [empty for _ in self.layers]

    def fork(self, parent: int, child: int, length: int) -> None:
        self.cache.fork_sequence(parent, child, length)
        self.texts[child] = [rows[:length] for rows in self.texts[parent]]

    def pop(self, seq_id: int, count: int) -> None:
        self.cache.pop_n(seq_id, count)
        self.texts[seq_id] = [rows[: len(rows) - count] for rows in self.texts[seq_id]]

    def expected(self, index: int, seq_id: int, begin: int, spans) -> np.ndarray:
        layer, qkv = self.layers[index], self.texts[seq_id][index]
        window = -layer.window if layer.kind == "mha_chunked" else layer.window
        positions = np.arange(len(qkv))
        q, k, v = np.split(qkv, [HEADS, HEADS + KV_HEADS], axis=1)
        q = q[begin:]
        if layer.rope.mode != "none":
            rope = reference.Rope(layer.rope.theta, rotary_dim=DIM)
            q, k = (
                reference.rotate(q, positions[begin:], rope),
                reference.rotate(k, positions, rope),
            )
        if layer.rope.mode == "normal":
            q, k = q.astype(qkv.dtype), k.astype(qkv.dtype)
        mask = reference.span_mask(begin, len(qkv), spans, window)
        return reference.attention(q, k, v, mask, DIM**-0.5, self.config.logit_softcap)[0]

    def step(self, lengths: dict[int, int], spans=()) -> None:
        total = sum(lengths.values())
        with self.cache.forward([*lengths], [*lengths.values()], spans=spans):
            for index in range(len(self.layers)):
                shape = (total, HEADS + 2 * KV_HEADS, DIM)
                qkv = self.rng.standard_normal(shape).astype(self.config.dtype)
                out, row = self.cache.attention(index, qkv).numpy(), 0
                for seq_id, length in lengths.items():
                    texts = self.texts[seq_id]
                    begin, rows = len(texts[index]), slice(row, row + length)
                    texts[index] = np.concatenate([texts[index], qkv[rows]])
                    own = [span[1:] for span in spans if span[0] == seq_id]
                    wanted = self.expected(index, seq_id, begin, own)
                    what = f"layer {index}, {length} rows of {seq_id} at {begin}"
                    reference.assert_close(out[rows], wanted, self.config.dtype, what)
                    row += length
        self.cache.check_integrity()


def run(model: Model) -> None:
    """Spans longer and shorter than tiles and windows, beside plain rows, forks and pops."""
    for seq_id in (0, 1, 2):
        model.add(seq_id)
    model.step({0: 130, 1: 5, 2: 1}, [(0, 3, 90), (0, 90, 100), (1, 0, 5)])
    model.step({1: 1, 0: 1})
    model.step({2: 70, 0: 100, 1: 20}, [(1, 6, 7), (2, 1, 66), (0, 171, 231)])
    model.fork(0, 3, 171)  # before the span
    model.step({3: 50, 1: 1, 0: 3}, [(3, 171, 221)])
    model.pop(3, 50)
    model.step({3: 10, 2: 9}, [(2, 71, 80)])
    for _ in range(3):
        model.step({i: 1 for i in range(4)})


@pytest.mark.parametrize("page_size", [4, 16])
@pytest.mark.parametrize("name", LAYERS)
@pytest.mark.parametrize("seed", [0], ids=lambda seed: f"seed{seed}")
def test_model(name, page_size, seed):
    run(Model(seed, config_of(LAYERS[name], page_size=page_size, logit_softcap=3.0)))


@pytest.mark.parametrize("dtype", with_slow(["bfloat16", "float16"], "float16"))
@pytest.mark.parametrize("seed", [0], ids=lambda seed: f"seed{seed}")
def test_half_precision(dtype, seed):
    run(Model(seed, config_of(dtype=dtype)))


def test_a_shared_prefix_before_a_span():
    """All rows see all of the pages that are shared, whatever follows them."""
    model = Model(0, config_of([pkv.LayerSpec()]))
    model.add(0)
    model.step({0: 160})
    for child in (1, 2, 3):
        model.fork(0, child, 160)
    model.step({0: 20, 1: 20, 2: 20, 3: 5}, [(i, 162, 178) for i in range(3)])


def test_saved_sequences_go_on_and_spans_are_recorded_nowhere(tmp_path):
    model = Model(0, config_of())
    model.add(0)
    model.step({0: 50}, [(0, 20, 40)])
    cache = model.cache
    with pytest.raises(
        ValueError, match="tokens from position 20 on recorded: there begins a span"
    ):
        cache.record_tokens(0, range(21))
    cache.record_tokens(0, range(20))
    assert cache.match_prefix(range(50)) == 16  # whole pages of what was recorded
    cache.fork_sequence(0, 1, 30)
    cache.pop_n(1, 10)
    with cache.forward([1], [12], tokens=range(20, 32)):  # no span is left in it
        for layer in range(2):
            cache.attention(layer, np.ones((12, HEADS + 2 * KV_HEADS, DIM), "float32"))
    assert cache.match_prefix(range(50)) == 32
    cache.save(tmp_path / "saved", [0])
    other = pkv.create(model.config)
    other.load(tmp_path / "saved")
    qkv = np.ones((1, HEADS + 2 * KV_HEADS, DIM), "float32")
    outs = []
    for each in (cache, other):
        with each.forward([0], [1]):
            outs.append([each.attention(layer, qkv).numpy() for layer in range(2)])
    np.testing.assert_array_equal(*outs)


def test_an_aborted_step_leaves_no_span():
    """Tokens behind where it began can be recorded."""
    cache = pkv.create(config_of())
    rows = np.zeros((6, HEADS + 2 * KV_HEADS, DIM), "float32")

    def step(seq_id, aborts=False, **how):
        cache.begin_forward([seq_id], [6], **how)
        for layer in range(2):
            cache.attention(layer, rows)
        cache.abort_forward() if aborts else cache.end_forward()

    cache.add_sequence(0)
    step(0, tokens=range(6))
    step(0, aborts=True, spans=[(0, 7, 11)])
    step(0, tokens=range(6, 12))


def test_refusals():
    cache = pkv.create(config_of())
    cache.add_sequence(0)
    cache.add_sequence(1)
    for spans, message in {
        ((0, 5, 11),): "must lie within the rows of its step, which for sequence 0 are positions 0",
        ((0, -1, 5),): "must lie within",
        ((0, 5, 5),): "must lie within",
        ((1, 0, 5),): "is of sequence 1, which is not in the step",
        ((0, 0, 5), (0, 4, 8)): "spans of sequence 0 overlap",
        ((0, 5),): "three numbers each",
    }.items():
        with pytest.raises(ValueError, match=message):
            cache.begin_forward([0], [10], spans=spans)
        assert not cache.is_in_forward and cache.sequence_length(0) == 0
    with pytest.raises(ValueError, match="token_tree_parents or spans, not both"):
        cache.begin_forward([0], [2], [-1, 0], spans=[(0, 0, 2)])
    with pytest.raises(ValueError, match="there begins a span"):
        cache.begin_forward([0], [10], tokens=range(10), spans=[(0, 2, 8)])
    assert not cache.is_in_forward and cache.sequence_length(0) == 0
    with cache.forward([0], [10], spans=[(0, 0, 5)]):
        rows = np.zeros((10, 8, DIM), "float32")
        with pytest.raises(ValueError, match="self_attention is not possible in a step with spans"):
            cache.self_attention(0, rows[:, :4], rows[:, 4:6], rows[:, 6:])
        cache.attention(0, rows)
        cache.attention(1, rows)
    plain = pkv.create(config_of(spans=False))
    plain.add_sequence(0)
    with pytest.raises(ValueError, match="make the cache with spans=True"):
        plain.begin_forward([0], [10], spans=[(0, 0, 5)])
    for layer, message in (
        (pkv.LayerSpec(lists=True), "layer 0: spans are not possible with layers of lists"),
        (pkv.LayerSpec("mla", qk_head_dim=48, v_head_dim=32), "layer 0: spans are not possible"),
    ):
        with pytest.raises(ValueError, match=message):
            replace(config_of(), layers=[layer, pkv.LayerSpec()])
    with pytest.raises(TypeError, match="spans must be a bool"):
        replace(config_of(), spans=1)


def test_memory():
    config = config_of()
    model = Model(0, config)
    assert model.cache.stats()["allocated_bytes"] == config.memory_bytes()
    model.add(0)
    model.step({0: 200}, [(0, 0, 200)])
    assert reserved_bytes(model.cache) == config.memory_bytes()


if __name__ == "__main__":
    import tvm.testing

    tvm.testing.main()
