# SPDX-License-Identifier: Apache-2.0
"""Layers of every kind in one cache, and caches that keep the layers of one pipeline stage."""

from __future__ import annotations

import numpy as np
import pytest
import tvm
import tvm_ffi
from tvm_ffi import Shape

import tvm_pagedkv as pkv
from tvm_pagedkv import LayerSpec

from ... import reference
from ...support.emulators.python_kernels import (
    KERNELS,
    LAYER,
    MLA_KERNELS,
    make_cache,
    poison,
    snapshot,
)
from ...support.harness.in_child import failures
from ...support.worlds.permissive_steps import permissive_step

MHA, MLA, LINEAR, SLIDING = range(4)
HEADS, KV_HEADS, WIDTH, V_WIDTH, WINDOW = 4, 2, 24, 16, 5
SM_SCALE = WIDTH**-0.5


SHAPE = {"num_qo_heads": HEADS, "num_kv_heads": KV_HEADS, "qk_head_dim": WIDTH}
LAYERS = {
    MHA: {"kind": "mha", **SHAPE},
    SLIDING: {"kind": "mha_sliding", "window": WINDOW, **SHAPE},
    LINEAR: {"kind": "linear"},
    MLA: {"kind": "mla", **SHAPE, "num_kv_heads": 1, "v_head_dim": V_WIDTH, "kernel_set": 1},
}


class Model:
    """A cache with layers of any kinds and its references, driven alike."""

    def __init__(self, cache: pkv.KVCache, kinds: list[int], first: int = 0):
        self.cache, self.kinds, self.first = cache, kinds, first
        windows = [WINDOW if kind == SLIDING else None for kind in kinds]
        self.expected = reference.ReferenceCache(len(kinds), np.dtype("float32"), windows=windows)
        self.latent = reference.ReferenceLatentCache(len(kinds), np.dtype("float32"))
        self.rng = np.random.default_rng(0)

    def change(self, name: str, *args) -> None:
        for each in (self.cache, self.expected, self.latent):
            getattr(each, name)(*args)

    def step(self, seq_ids: list[int], lengths: list[int]) -> None:
        with self.cache.forward(seq_ids, lengths):
            for layer, kind in enumerate(self.kinds):
                qkv = self.rng.standard_normal((sum(lengths), HEADS + 2 * KV_HEADS, WIDTH))
                qkv = qkv.astype("float32")
                if kind == LINEAR:
                    with pytest.raises(ValueError, match="linear attention layer"):
                        self.cache.attention(self.first + layer, qkv)
                elif kind == MLA:
                    latent, q = qkv[:, HEADS], qkv[:, :HEADS]
                    self.cache.append_mla_kv(self.first + layer, latent)
                    self.latent.append(layer, seq_ids, lengths, latent)
                    o, _ = self.cache.cross_attention(self.first + layer, q, sm_scale=SM_SCALE)
                    with_step = max(lengths) == 1
                    want = self.latent.absorbed(
                        layer, seq_ids, lengths, q, V_WIDTH, SM_SCALE, with_step
                    )
                    reference.assert_close(o.numpy(), want[0], "float32", f"layer {layer}")
                else:
                    o = self.cache.attention(self.first + layer, qkv, sm_scale=SM_SCALE)
                    want = self.expected.attention(layer, seq_ids, lengths, qkv, KV_HEADS, SM_SCALE)
                    reference.assert_close(o.numpy(), want[0], "float32", f"layer {layer}")
        self.cache.check_integrity()
        poison(self.cache)

    def run(self) -> None:
        for seq_id in (0, 1):
            self.change("add_sequence", seq_id)
        self.step([0, 1], [11, 2])
        self.step([1, 0], [1, 1])
        self.change("fork_sequence", 0, 2, 12)
        self.step([2, 0, 1], [1, 1, 1])
        self.step([0, 2], [3, 7])


@pytest.mark.parametrize(
    "kinds",
    [[MHA, MLA], [MLA, SLIDING, MHA, MLA], [LINEAR, MHA], [MLA, LINEAR, LINEAR]],
    ids=str,
)
def test_kinds_in_one_cache(kinds):
    layers = [LAYERS[kind] for kind in kinds]
    cache = make_cache([KERNELS, MLA_KERNELS], layers=layers, max_total_tokens=128)
    spelt = ["mha", "mla", "linear", "mha_sliding"]
    assert [layer["kind"] for layer in cache.description["layers"]] == [
        spelt[k] for k in kinds if k != LINEAR
    ]
    Model(cache, kinds).run()


def test_linear_layers_take_no_memory():
    with_linear = make_cache(layers=[LAYER, {"kind": "linear"}, {"kind": "linear"}])
    assert with_linear.stats() == make_cache(layers=[LAYER]).stats()
    config = {
        "num_layers": 3, "num_qo_heads": HEADS, "num_kv_heads": KV_HEADS, "qk_head_dim": WIDTH,
    }  # fmt: skip
    layers = [LayerSpec("linear"), LayerSpec(), LayerSpec("linear")]
    memory = pkv.KVCacheConfig(**config, layers=layers).memory_bytes()
    assert memory == pkv.KVCacheConfig(**{**config, "num_layers": 1}).memory_bytes()
    with pytest.raises(ValueError, match="all are of kind 'linear'"):
        pkv.KVCacheConfig(**config, layers=[LayerSpec("linear")] * 3)


# --- pipeline stages ------------------------------------------------------------------------------

KINDS = [MHA, SLIDING, MLA, SLIDING, MHA]
INDPTR = [0, 2, 2, 5]


def make_stage(stage: int) -> pkv.KVCache:
    layers = [LAYERS[kind] for kind in KINDS]
    return make_cache(
        [KERNELS, MLA_KERNELS], layers=layers, layer_indptr=Shape(INDPTR), stage=stage
    )


@pytest.mark.parametrize("stage", [0, 1, 2])
def test_a_stage_serves_its_layers_under_their_own_ids(stage):
    """Stage 1 has no layers: it follows the lengths of the sequences all the same."""
    cache = make_stage(stage)
    begin, end = INDPTR[stage : stage + 2]
    assert len(cache.description["layers"]) == end - begin
    model = Model(cache, KINDS[begin:end], begin)
    model.run()
    assert cache.sequence_length(2) == 20
    with permissive_step(cache, [0], [1]):
        before = snapshot(cache, [0, 1, 2])
        for layer in set(range(len(KINDS))) - set(range(begin, end)):
            other = 0 if layer < 2 else 2
            text = rf"layer {layer} is of pipeline stage {other}; this cache is of stage {stage}"
            with pytest.raises(IndexError, match=text):
                cache.attention(layer, np.zeros((1, HEADS + 2 * KV_HEADS, WIDTH), "float32"))
        for layer in (-1, len(KINDS)):
            with pytest.raises(IndexError, match=rf"layer {layer} is not in \[0, 5\)"):
                cache.attention(layer, np.zeros((1, HEADS + 2 * KV_HEADS, WIDTH), "float32"))
        assert snapshot(cache, [0, 1, 2]) == before


def test_a_stage_without_layers_has_tiers_without_pages():
    cache = make_stage(1)
    pkv.open_prefix_cache(cache, pkv.PrefixCacheConfig(host_bytes=1 << 20, write_policy="through"))
    prompt = list(range(30))
    assert cache.match_prefix(prompt) == cache.add_sequence(0, prompt) == 0
    with cache.forward([0], [30], tokens=prompt):
        pass
    assert cache.sequence_length(0) == cache.num_recorded_tokens(0) == 30
    assert cache.locate_prefix(prompt) == [()] * (30 // cache.description["page_size"])
    assert cache.locate_prefix([]) == []
    cache.prefetch(prompt)
    cache.remove_sequence(0)
    assert cache.match_prefix(prompt) == 0  # as without tiers: it keeps nothing
    tiers = cache.stats()["prefix_tiers"]
    assert tiers["num_host_pages"] == tiers["host_capacity_bytes"] == 0
    assert cache.flush_prefixes() and cache.close_prefixes()
    cache.check_integrity()


def test_stages_share_the_memory_of_the_whole():
    whole = make_cache([KERNELS, MLA_KERNELS], layers=[LAYERS[kind] for kind in KINDS])
    of_stages = [make_stage(stage).stats()["page_pool_bytes"] for stage in range(3)]
    assert sum(of_stages) == whole.stats()["page_pool_bytes"] and of_stages[1] == 0


def test_a_stage_of_a_config():
    fields = {"num_layers": 3, **SHAPE, "dtype": "float32", "layer_indptr": [0, 1, 3]}
    caches = [pkv.create(pkv.KVCacheConfig(**fields, stage=stage)) for stage in range(2)]
    for stage, cache in enumerate(caches):
        config = pkv.KVCacheConfig(**fields, stage=stage)
        assert cache.stats()["allocated_bytes"] == config.memory_bytes()
    most = max(cache.stats()["allocated_bytes"] for cache in caches)
    assert pkv.KVCacheConfig(**fields).memory_bytes() == most
    with pytest.raises(ValueError, match="2 pipeline stages, and this is not a Disco worker"):
        pkv.create(pkv.KVCacheConfig(**fields))
    for change in ({"layer_indptr": [0, 2]}, {"layer_indptr": [0, 3, 1, 3]}, {"stage": 2}):
        with pytest.raises(ValueError, match="layer_indptr|stage must be between 0 and 1"):
            pkv.KVCacheConfig(**{**fields, **change})


def test_a_stage_without_pages_may_be_of_a_cache_that_sends():
    layers = [LAYERS[kind] for kind in KINDS]
    cache = make_cache(
        [KERNELS, MLA_KERNELS], layers=layers, layer_indptr=Shape(INDPTR), stage=1,
        enable_kv_transfer=True,
    )  # fmt: skip
    assert cache.stats()["page_pool_bytes"] == 0
    cache.add_sequence(0)
    with cache.forward([0], [5]):
        pass
    cache.check_integrity()


def test_a_stage_without_pages_has_nothing_to_send():
    def mark() -> None:
        cache = make_stage(1)
        cache.add_sequence(0)
        handler = tvm_ffi.convert(lambda block: None)
        tvm_ffi.get_global_func("pagedkv.set_send_handler")(cache, 0, handler, Shape([]))
        with pytest.raises(ValueError, match="sequence 0 cannot be sent: no layer .* has K and V"):
            tvm_ffi.get_global_func("vm.builtin.kv_cache_disagg_mark_send")(
                cache, 0, 0, Shape([]), 0
            )
        assert tvm_ffi.get_global_func("pagedkv.send_id")(cache, 0) == 0
        with cache.forward([0], [1]):
            pass

    assert failures([("mark_send", mark)]) == []


if __name__ == "__main__":
    import tvm.testing

    tvm.testing.main()
