# SPDX-License-Identifier: Apache-2.0
"""Caches whose layers are quantized: steps, forks, trees, reads and writes of rows, memory."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import tvm
import tvm_ffi

import tvm_pagedkv as pkv
from tir_kernels.spec import KernelSpec, VectorTarget
from tvm_pagedkv.compiler import config_map, warn_if_slow

from ... import reference
from ...support.cases.caches.quantized_cache_cases import (
    CODEC_NAMES,
    LAYER,
    MLA_LAYER,
    SLIDING_LAYER,
    QuantizedPair,
    kernel_sets,
    make_quantized,
    quantized_layers,
)
from ...support.emulators.python_kernels import snapshot

ALL_KINDS = [LAYER, SLIDING_LAYER, MLA_LAYER]


def fed(pair: QuantizedPair) -> QuantizedPair:
    """Sequences that share pages, have popped, and slid."""
    for seq_id in (0, 1):
        pair.add(seq_id)
    pair.step([0, 1], [9, 3])
    pair.step([0, 1], [1, 1])
    pair.fork(0, 2)
    pair.fork(0, 3, 9)
    pair.step([2, 0, 3], [2, 3, 1])  # writes to pages that they share
    pair.pop(0, 4)
    pair.step([3, 0, 1, 2], [1, 1, 1, 1])
    return pair


@pytest.mark.parametrize("codec", CODEC_NAMES)
@pytest.mark.parametrize("layer", ALL_KINDS, ids=lambda x: x["kind"])
def test_steps(codec, layer):
    pair = fed(QuantizedPair([layer, layer], codec))
    assert pair.cache.stats()["cow_page_copies"] > 0
    pair.check_rows()


@pytest.mark.parametrize("codec", CODEC_NAMES)
def test_layers_of_all_kinds_and_types(codec):
    layers = [*ALL_KINDS, LAYER, LAYER]
    kv_dtypes = [codec, "float32", codec, "int8", "float32"]
    pair = fed(QuantizedPair(layers, kv_dtypes))
    pair.check_rows()
    described = pair.cache.description["layers"]
    assert [layer["kv_dtype"] for layer in described] == kv_dtypes
    groups = pair.cache.stats()["groups"]
    # Layers whose pages have other bytes do not share a page table.
    assert len(groups) == (4 if codec == "int8" else 5)
    for layer in described:
        group = groups[layer["group"]]
        assert (group["kv_dtype"], group["page_bytes"]) == (layer["kv_dtype"], layer["page_bytes"])


@pytest.mark.parametrize("codec", CODEC_NAMES)
@pytest.mark.parametrize("mode", ["normal", "inline"])
def test_rotation(codec, mode):
    fed(QuantizedPair([LAYER], codec, mode=mode)).check_rows()


@pytest.mark.parametrize("codec", CODEC_NAMES)
@pytest.mark.parametrize("is_moved_by_kernel", [True, False])
def test_trees(codec, is_moved_by_kernel):
    kernels = {} if is_moved_by_kernel else {"compact_copy": None}
    pair = QuantizedPair(ALL_KINDS, codec, kernels=kernels)
    for seq_id in (0, 1):
        pair.add(seq_id)
    pair.step([0, 1], [5, 2])
    pair.step([0, 1], [5, 3], [-1, 0, 0, 2, 1, -1, 0, 0])
    pair.commit([0, 1], [3, 2])
    assert pair.cache.stats()["moved_tree_nodes"] > 0
    pair.check_rows()
    pair.step([1, 0], [1, 2])


@pytest.mark.parametrize("codec", CODEC_NAMES)
def test_self_and_cross_attention(codec):
    """A step's own rows are attended to as they came, the past as the pages hold it."""
    pair = QuantizedPair([LAYER], codec)
    pair.add(0)
    pair.step([0], [7])
    k_past, v_past = pair.rows(0, 0)
    q, k, v = pair.normal(3, 4, 32), pair.normal(3, 2, 32), pair.normal(3, 2, 32)
    with pair.cache.forward([0], [3]):
        parts = pair.cache.self_attention(0, q, k, v)
        merged = pair.cache.merge_attention(*parts, *pair.cache.cross_attention(0, q))
    whole_k, whole_v = np.concatenate([k_past, k]), np.concatenate([v_past, v])
    wanted = reference.attention(q, whole_k, whole_v, np.tri(3, 10, 7, dtype=bool), 32**-0.5)
    reference.assert_state_close([x.numpy() for x in merged], wanted, "float32", what="merged")


@pytest.mark.parametrize("codec", CODEC_NAMES)
def test_rows_are_written_and_read(codec):
    pair = fed(QuantizedPair(ALL_KINDS, codec))
    before = pair.cache.debug_get_kv(2, 4)[0].numpy()
    k, v, latent = pair.normal(2, 3, 2, 32), pair.normal(2, 3, 2, 32), pair.normal(1, 3, 64)
    pair.cache.debug_set_kv(0, 5, k, v)
    pair.cache.debug_set_kv_mla(0, 5, latent)
    for index, planes in enumerate([(k[0], v[0]), (k[1], v[1]), (latent[0],)]):
        expected = pair.expected[index]
        for row, new in zip(pair.rows(index, 0), planes, strict=True):
            row[5:8] = expected.kept(new)
    pair.check_rows()
    np.testing.assert_array_equal(pair.cache.debug_get_kv(2, 4)[0].numpy(), before)  # a fork


def test_a_write_that_fails_changes_nothing():
    """The kernel of the second layer fails when the first layer has been written."""
    layers, rng, calls = [LAYER, LAYER], np.random.default_rng(0), []

    def fail_in_the_sixth_call(*args):
        calls.append(args)
        if len(calls) == 6:  # after those of two steps, and of the first layer
            raise RuntimeError("the kernel fails")
        append(*args)

    append = kernel_sets([LAYER], quantized_layers([LAYER], ["int8"]))[0]["transpose_append"]
    cache = make_quantized(layers, "int8", kernels={"transpose_append": fail_in_the_sixth_call})
    cache.add_sequence(0)
    for length in (3, 2):
        with cache.forward([0], [length]):
            for layer in range(2):
                cache.attention(layer, rng.standard_normal((length, 8, 32), dtype="float32"))
    cache.fork_sequence(0, 1)
    before = snapshot(cache, [0, 1])
    rows = [rng.standard_normal((2, 4, 2, 32), dtype="float32") for _ in range(2)]
    with pytest.raises(RuntimeError, match="the kernel fails"):
        cache.debug_set_kv(0, 1, *rows)
    after = snapshot(cache, [0, 1])
    before.pop("stats"), after.pop("stats")
    assert after == before
    cache.check_integrity()
    cache.debug_set_kv(0, 1, *rows)
    assert cache.debug_get_kv(0, 1)[0].numpy().tobytes() != before[0][3][0]


def test_rows_of_two_types_are_not_read_together():
    cache = make_quantized([LAYER, LAYER], ["int8", "float16"])
    cache.add_sequence(0)
    with pytest.raises(ValueError, match="differ in their heads or kv_dtype"):
        cache.debug_get_kv(0)
    # Quantized rows come in the type of a step.
    cache = make_quantized([LAYER, LAYER], ["int8", "float16"], dtype="float16")
    cache.add_sequence(0)
    assert cache.debug_get_kv(0)[0].dtype == "float16"


# --- configurations -----------------------------------------------------------------------------

SIZES = {"num_layers": 3, "num_qo_heads": 4, "num_kv_heads": 2, "qk_head_dim": 32}
SMALL = {"max_num_sequences": 4, "max_total_tokens": 100, "prefill_chunk_size": 16}


def config_of(**fields) -> pkv.KVCacheConfig:
    return pkv.KVCacheConfig(**SIZES | SMALL | {"dtype": "float32", "page_size": 4} | fields)


def created(config: pkv.KVCacheConfig) -> pkv.KVCache:
    """A cache of a configuration over NumPy kernels."""
    resolved = config.resolved()
    layers = [
        {
            name: getattr(layer, name)
            for name in (*SIZES, "kind", "v_head_dim")
            if name[:4] != "num_"
        }
        | {"num_kv_heads": layer.num_kv_heads}
        for layer in resolved.layers
    ]
    quantized = quantized_layers(layers, [x.kv_dtype for x in resolved.layers], config.page_size)
    sets = kernel_sets(layers, quantized)
    sets_of = SimpleNamespace(layer_sets=range(len(layers)), conv_sets=[0] * len(layers))
    described = config_map(resolved, sets_of, tvm.cpu())
    return tvm_ffi.get_global_func("pagedkv.create")(described, sets, tvm.cpu())


LAYERS = {
    "all": None,
    "one of a type of its own": [
        pkv.LayerSpec(),
        pkv.LayerSpec(kv_dtype="float32"),
        pkv.LayerSpec(kind="mha_sliding", window=5),
    ],
    "mla": [pkv.LayerSpec(kind="mla", v_head_dim=32, qk_head_dim=64)] * 3,
}


@pytest.mark.parametrize("codec", CODEC_NAMES)
@pytest.mark.parametrize("name", LAYERS)
def test_memory(codec, name):
    config = config_of(kv_dtype=codec, layers=LAYERS[name])
    cache = created(config)
    assert cache.stats()["allocated_bytes"] == config.memory_bytes()
    assert cache.description["kv_dtype"] == codec
    plain = [replace(layer, kv_dtype=None) for layer in config.layers or ()]
    plain = replace(config, kv_dtype=None, layers=plain or None)
    assert config.memory_bytes() < plain.memory_bytes()


@pytest.mark.parametrize(
    ("codec", "factor"),
    [("int8", 1.9), ("float8_e4m3fn", 1.9), ("int5", 2.9), ("int5,int4", 3.2), ("int4", 3.5)],
)
def test_tokens_of_a_page(codec, factor):
    """Pages of 128 columns hold so many times the tokens of float16 ones of the same bytes."""
    wide = {"qk_head_dim": 128, "dtype": "float16", "page_size": 16}
    configs = [config_of(**wide, kv_dtype=name) for name in (codec, None)]
    quantized, plain = (config.resolved().layers[0] for config in configs)
    assert plain.page_bytes(16) / quantized.page_bytes(16) >= factor


ERRORS = {
    "unknown": (
        {"kv_dtype": "int3"},
        "kv_dtype must be one of .*, int8, float8_e4m3fn, int5, int4; got",
    ),
    "unknown of a layer": (
        {"layers": [{"kv_dtype": "fp8"}, {}, {}]},
        "layer.kv_dtype must be one of .*int8",
    ),
    "groups": ({"kv_dtype": "int4", "qk_head_dim": 80}, "layer 0: .*multiples of 32, got 80; cho"),
    "groups of latent rows": (
        {"kv_dtype": "int4", "layers": [{"kind": "mla", "qk_head_dim": 64, "v_head_dim": 24}] * 3},
        "layer 0: .*multiples of 32, got 24",
    ),
    "inline": (
        {"kv_dtype": "int4", "rope": pkv.RopeConfig(mode="inline")},
        'layer 0: kv_dtype \'int4\' .* rope mode "inline" .* choose "int8" or "float8_e4m3fn"',
    ),
    "linear": ({"layers": [{}, {}, {"kind": "linear", "kv_dtype": "int8"}]}, "keeps no K and V"),
    "nobody": (
        {"kv_dtype": "int8", "layers": [{"kv_dtype": "int4"}] * 3},
        "kv_dtype 'int8' has no effect: every layer sets its own",
    ),
}


@pytest.mark.parametrize("name", ERRORS)
def test_configurations_without_a_codec(name):
    fields, message = ERRORS[name]
    with pytest.raises(ValueError, match=message):
        if "layers" in fields:
            fields = fields | {"layers": [pkv.LayerSpec(**layer) for layer in fields["layers"]]}
        config_of(**fields)


def test_the_type_of_a_cache_is_that_of_a_layer():
    config = config_of(layers=[pkv.LayerSpec(kv_dtype="int4")] * 3)
    assert config.resolved().kv_dtype == "int4"
    assert replace(config, max_num_sequences=2).resolved().kv_dtype == "int4"
    # Latent rows are not rotated by the cache.
    config_of(kv_dtype="int4", layers=LAYERS["mla"], rope=pkv.RopeConfig(mode="inline"))
    # A linear layer has none.
    layers = [pkv.LayerSpec(), pkv.LayerSpec(kind="linear"), pkv.LayerSpec()]
    config = config_of(kv_dtype="int8", layers=layers).resolved()
    assert [layer.kv_dtype for layer in config.layers] == ["int8", None, "int8"]
    assert config.layers[1].page_bytes(4) == 0


def test_a_codec_that_is_slow_on_a_target_is_told(caplog):
    slow = VectorTarget(lanes=8, registers=16, has_f16_convert=False)
    for codec in CODEC_NAMES:
        for _ in range(2):
            warn_if_slow(KernelSpec(4, 2, 32, 32, "float32", codec, target=slow))
        warn_if_slow(KernelSpec(4, 2, 32, 32, "float32", "float32", target=slow))
    told = [record.getMessage() for record in caplog.records]
    assert all("kv_dtype None" in text and "without" in text for text in told)
    named = [name for name in CODEC_NAMES for text in told if repr(name) in text]
    assert named == list(CODEC_NAMES)  # once each
    caplog.clear()
    with_words = VectorTarget(lanes=8, registers=16, has_word_dot=True)
    for codec in ("int8", "int4", "int8,int4", "float8_e4m3fn", "int5,int4"):
        warn_if_slow(KernelSpec(4, 2, 32, 32, "float32", codec, target=with_words))
    (record,) = caplog.records
    assert "int5,int4" in record.getMessage()


def test_other_kernels_are_refused():
    quantized = make_quantized([LAYER], "int8")  # its own are taken
    assert quantized.description["layers"][0]["is_quantized"]
    kernel = kernel_sets([LAYER], [None])[0]["decode"]
    for tagged, whose in (
        (["tirx", kernel], "the stock cache"),
        (["flashinfer", kernel, kernel], "FlashInfer"),
    ):
        with pytest.raises(ValueError, match=f"as int8, which only .* 'decode' is of {whose}"):
            make_quantized([LAYER], "int8", kernels={"decode": tagged})


if __name__ == "__main__":
    import tvm.testing

    tvm.testing.main()
