# SPDX-License-Identifier: Apache-2.0
"""Caches with layers that have windows, over the compiled kernels, from `tvm_pagedkv.create`."""

from __future__ import annotations

from dataclasses import replace

import ml_dtypes  # noqa: F401  (registers bfloat16 with NumPy)
import numpy as np
import pytest

import tvm_pagedkv as pkv
from tvm_pagedkv.config import ResolvedLayer

from ... import reference
from ...support.cases.caches.cache_cases import reserved_bytes
from ...support.emulators.python_kernels import poison, shuffle
from ...support.harness.selections import latin_square

HEADS, KV_HEADS, DIM = 4, 2, 32
SM_SCALE = DIM**-0.5
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}


class Model:
    """A cache and one reference for each layer, since each layer has a rotation of its own."""

    def __init__(self, layers, seed: int, **fields):
        small = {"max_num_sequences": 4, "max_total_tokens": 1024, "prefill_chunk_size": 200}
        self.config = pkv.KVCacheConfig(
            num_layers=len(layers), num_qo_heads=HEADS, num_kv_heads=KV_HEADS, qk_head_dim=DIM,
            layers=layers, **{"dtype": "float32", **small, **fields},
        )  # fmt: skip
        self.cache = pkv.create(self.config)
        shuffle(self.cache, seed)
        self.rng = np.random.default_rng(seed)
        self.expected = [self.reference_of(layer) for layer in self.config.resolved().layers]

    def reference_of(self, layer: ResolvedLayer) -> reference.ReferenceCache:
        rope = reference.Rope(layer.rope.theta, layer.rope.scale, DIM, layer.rope.scaling_dict)
        dtype = np.dtype(layer.kv_dtype)
        window = -layer.window if layer.kind == "mha_chunked" else layer.window
        return reference.ReferenceCache(1, dtype, rope, layer.rope.mode, [window])

    def change(self, name: str, *args) -> None:
        for each in (self.cache, *self.expected):
            getattr(each, name)(*args)

    def step(self, seq_ids: list[int], lengths: list[int]) -> None:
        shape = (sum(lengths), HEADS + 2 * KV_HEADS, DIM)
        with self.cache.forward(seq_ids, lengths):
            for layer, expected in enumerate(self.expected):
                qkv = self.rng.standard_normal(shape).astype(self.config.dtype)
                out = self.cache.attention(layer, qkv).numpy()
                o, _ = expected.attention(0, seq_ids, lengths, qkv, KV_HEADS, SM_SCALE)
                what = f"layer {layer}, {lengths} rows of {seq_ids}"
                reference.assert_close(out, o, self.config.dtype, what)
        self.cache.check_integrity()
        poison(self.cache)

    def run(self) -> None:
        """Chunks shorter and longer than the windows, forks, pops, several in one batch."""
        for seq_id in (0, 1):
            self.change("add_sequence", seq_id)
        self.step([0, 1], [150, 3])
        self.step([1, 0], [1, 1])
        self.change("fork_sequence", 0, 2, 140)
        self.change("fork_sequence", 1, 3)
        self.step([2, 0, 1, 3], [1, 20, 1, 2])
        self.change("pop_n", 0, 9)
        self.step([3, 0], [100, 5])
        self.change("pop_n", 3, 90)  # further back than the windows
        for _ in range(20):
            self.step([0, 1, 2, 3], [1, 1, 1, 1])
        self.change("remove_sequence", 0)
        self.step([2], [200])


SHARE = {"rope_type": "proportional", "partial_rotary_factor": 0.25}
SHORT, LONG = (
    pkv.LayerSpec("mha_sliding", 20, rope=pkv.RopeConfig(theta=1e4)),
    pkv.LayerSpec(rope=pkv.RopeConfig(theta=1e6, scaling={"rope_type": "linear", "factor": 8})),
)
NONE = pkv.RopeConfig("none")
LAYERS = {
    "own rotations": [
        SHORT,
        LONG,
        pkv.LayerSpec("mha_sliding", 5, rope=pkv.RopeConfig(theta=500.0, scaling=YARN)),
    ],
    "inline": [
        pkv.LayerSpec("mha_sliding", 20, rope=pkv.RopeConfig("inline")),
        pkv.LayerSpec(rope=pkv.RopeConfig("inline", theta=1e6)),
    ],
    "none, normal, inline": [
        LONG,
        replace(LONG, rope=NONE),
        SHORT,
        pkv.LayerSpec("mha_sliding", 7, rope=NONE),
        replace(SHORT, rope=replace(SHORT.rope, mode="inline")),
    ],
    "proportional": [
        pkv.LayerSpec(rope=pkv.RopeConfig(theta=100.0, scaling=SHARE)),
        pkv.LayerSpec(rope=pkv.RopeConfig("inline", theta=100.0, scaling=SHARE)),
    ],
    "all": [pkv.LayerSpec("mha_sliding", window) for window in (1, 64)],
    "chunks": [
        pkv.LayerSpec("mha_chunked", 64),
        pkv.LayerSpec("mha_chunked", 21, rope=pkv.RopeConfig("inline")),
        pkv.LayerSpec(rope=NONE),
        pkv.LayerSpec("mha_sliding", 64),
    ],
}


@latin_square(4, "page_size", "name")
@pytest.mark.parametrize("page_size", [4, 64])
@pytest.mark.parametrize("name", LAYERS)
@pytest.mark.parametrize("seed", [0], ids=lambda seed: f"seed{seed}")
def test_model(name, page_size, seed):
    Model(LAYERS[name], seed, page_size=page_size).run()


@pytest.mark.parametrize("dtype", ["bfloat16", pytest.param("float16", marks=pytest.mark.slow)])
@pytest.mark.parametrize("seed", [0], ids=lambda seed: f"seed{seed}")
def test_half_precision(dtype, seed):
    Model([pkv.LayerSpec("mha_sliding", 30), pkv.LayerSpec()], seed, dtype=dtype).run()


@pytest.mark.parametrize("seed", [0], ids=lambda seed: f"seed{seed}")
def test_a_chunk_is_held_until_the_next_one_has_what_can_be_popped(seed):
    model = Model([pkv.LayerSpec("mha_chunked", 64)], seed, page_size=16, max_total_tokens=512)
    model.change("add_sequence", 0)
    firsts = []
    for _ in range(30):
        model.step([0], [8])
        firsts.append(model.cache.first_position(0))
    assert firsts == [max(8 * (i + 1) - 16, 0) // 64 * 64 for i in range(30)]
    model.change("pop_n", 0, 200)  # back to 40, in the first chunk
    model.step([0], [30])
    with pytest.raises(ValueError, match="sliding_window is not possible with layers that attend"):
        replace(model.config, sliding_window=True)


@pytest.mark.parametrize("seed", [0], ids=lambda seed: f"seed{seed}")
def test_a_long_sequence_holds_a_few_pages(seed):
    """Far behind the start of the sequence, with pages that were used before."""
    window = 32
    model = Model([pkv.LayerSpec("mha_sliding", window)], seed, max_total_tokens=512)
    model.change("add_sequence", 0)
    for i in range(30):
        model.step([0], [199 if i % 3 else 1])
    assert model.cache.sequence_length(0) > 3000
    assert len(model.cache.page_table(0)) <= window // 16 + 2
    assert reserved_bytes(model.cache) == model.config.memory_bytes()


if __name__ == "__main__":
    import tvm.testing

    tvm.testing.main()
