# SPDX-License-Identifier: Apache-2.0
"""Layers whose rows are quantized by static scales of K and V, as calibrated checkpoints have."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import tvm
import tvm_ffi

import tvm_pagedkv as pkv
from tir_kernels.codec import codec_of
from tvm_pagedkv.config import KVCacheConfig
from tvm_pagedkv.transfer import Receiver, Sender, local_channels

from ... import reference
from ...reference.quantized import keep
from ...support.cases.caches.cache_cases import DIM, NUM_KV_HEADS, NUM_QO_HEADS, CachePair
from ...support.cases.caches.quantized_cache_cases import make_quantized
from ...support.emulators.python_kernels import KERNELS, LAYER, make_config

# Of every four layers: scales of all heads, of each head, in a window, and of rows.
SCALES = [(0.01, 0.02), ((0.004, 0.03), (0.008, 0.02)), (0.01, (0.01, 0.006)), None]


def config_of(kv_dtype="float8_e4m3fn", scales=SCALES, **fields) -> KVCacheConfig:
    kinds = [{}, {}, {"kind": "mha_sliding", "window": 11}, {}]
    layers = [pkv.LayerSpec(kv_scales=s, **k) for k, s in zip(kinds, scales, strict=True)]
    return KVCacheConfig(
        **{
            "num_layers": len(layers),
            "num_qo_heads": NUM_QO_HEADS,
            "num_kv_heads": NUM_KV_HEADS,
            "qk_head_dim": DIM,
            "dtype": "float32",
            "kv_dtype": kv_dtype,
            "max_num_sequences": 4,
            "max_total_tokens": 512,
            "prefill_chunk_size": 64,
            "page_size": 8,
            "layers": layers,
            "rope": pkv.RopeConfig(mode="none"),
            **fields,
        }
    )


class Pair(CachePair):
    """A cache of such layers and its reference."""

    def __init__(self, config: KVCacheConfig, seed: int = 0):
        layers = config.resolved().layers
        windows = [layer.window for layer in layers]
        rope, mode = reference.Rope(rotary_dim=DIM), layers[0].rope.mode
        codec = codec_of(config.resolved().kv_dtype)
        expected = reference.ReferenceCache(len(windows), codec, rope, mode, windows)
        expected.static_scales = [
            None if layer.kv_scales is None else np.array(layer.kv_scales, "f4") for layer in layers
        ]
        print("seed", seed)
        super().__init__(pkv.create(config), expected, seed)

    def check_rows(self) -> None:
        for seq_id in self.expected.sequences:
            begin = max(self.cache.first_position(seq_id, group) for group in range(2))
            found = self.cache.debug_get_kv(seq_id, begin)
            for layer in range(self.expected.num_layers):
                for plane, rows in enumerate(found):
                    want = self.expected.kv(seq_id, layer)[plane][begin:]
                    np.testing.assert_array_equal(rows.numpy()[layer], want)


@pytest.mark.parametrize("kv_dtype", ["float8_e4m3fn", "int8", ("int8", "float8_e4m3fn")])
def test_steps_forks_and_trees(kv_dtype):
    larger = [s and tuple(np.multiply(x, 3.5).tolist() for x in s) for s in SCALES]
    pair = Pair(config_of(kv_dtype, SCALES if kv_dtype == "float8_e4m3fn" else larger))
    for seq_id in (0, 1):
        pair.add(seq_id)
    pair.step([0, 1], [13, 5])
    pair.step([0, 1], [1, 1])
    pair.fork(0, 2)
    pair.step([2, 1, 0], [3, 1, 20])
    pair.pop(1, 2)
    pair.step([1], [1])
    pair.check_rows()


def test_values_beyond_the_largest_code_are_cut_off():
    pair = Pair(config_of(scales=[(0.001, 0.002)] * 4))
    pair.add(0)
    pair.step([0], [9])
    k, v = pair.expected.kv(0, 0)
    assert np.abs(k).max() == np.float32(0.001) * 448
    assert np.abs(v).max() == np.float32(0.002) * 448
    pair.check_rows()
    pair.step([0], [1])


def test_parts_of_attention():
    """Rows that `self_attention` appends are kept by the scales, too."""
    pair = Pair(config_of())
    pair.add(0)
    pair.step([0], [5])
    with pair.cache.forward([0], [3]):
        for layer in range(pair.expected.num_layers):
            q, k, v = pair.normal(3, 4, DIM), pair.normal(3, 2, DIM), pair.normal(3, 2, DIM)
            pair.cache.self_attention(layer, q, k, v)
            pair.expected.attention(layer, [0], [3], np.concatenate([q, k, v], 1), 2, 1.0)
    pair.check_rows()


def test_rotation():
    pair = Pair(config_of("int8", [(0.04, 0.03)] * 4, rope=pkv.RopeConfig(mode="normal")))
    pair.add(0)
    pair.step([0], [40])
    pair.step([0], [1])


def test_written_rows():
    pair = Pair(config_of())
    pair.add(0)
    pair.step([0], [6])
    k, v = pair.normal(4, 2, 2, DIM), pair.normal(4, 2, 2, DIM)
    pair.cache.debug_set_kv(0, 3, k, v)
    for layer in range(4):
        for plane, rows in enumerate((k, v)):
            kept = pair.expected.kept(rows[layer], is_v=plane == 1, layer=layer)
            pair.expected.kv(0, layer)[plane][3:5] = kept
    pair.check_rows()


def test_rows_that_are_not_finite():
    """They have the scale NaN, as with scales of rows."""
    cache = pkv.create(config_of())
    cache.add_sequence(0)
    rows = np.ones((2, NUM_QO_HEADS + 2 * NUM_KV_HEADS, DIM), "float32")
    rows[1, NUM_QO_HEADS, 3] = np.nan
    rows[1, NUM_QO_HEADS + 1, 3] = np.inf
    with cache.forward([0], [2]):
        for layer in range(4):
            cache.attention(layer, rows)
    k, v = (x.numpy() for x in cache.debug_get_kv(0))
    assert np.isnan(k[:, 1]).all() and np.isfinite(k[:, 0]).all() and np.isfinite(v).all()


def test_files_know_the_scales(tmp_path):
    pair = Pair(config_of())
    pair.add(0)
    pair.step([0], [9])
    pair.cache.save(tmp_path / "same", [0])
    again = pkv.create(config_of())
    again.load(tmp_path / "same", {0: 3})
    for mine, theirs in zip(pair.cache.debug_get_kv(0), again.debug_get_kv(3), strict=True):
        np.testing.assert_array_equal(mine.numpy(), theirs.numpy())
    for scales in ([(0.01, 0.03), *SCALES[1:]], [None] * 4):
        other = pkv.create(config_of(scales=scales))
        with pytest.raises(ValueError, match="kv_scales"):
            other.load(tmp_path / "same", {0: 3})
        other.load(tmp_path / "same", {0: 3}, convert=True)


def test_files_of_other_scales_are_rounded_again(tmp_path):
    """Into static scales, out of them, and into others; pages of another type as well."""
    print("seed 1")
    normal = np.random.default_rng(1).standard_normal
    configs = {
        "alike": config_of("int8", [(0.03, 0.04)] * 4),
        "others": config_of("int8", [(0.02, 0.03), None, (0.01, 0.02), (0.03, (0.02, 0.05))]),
        "rows": config_of("int8", [None] * 4),
        "plain": config_of(None, [None] * 4),
    }
    for source in configs:
        cache = pkv.create(configs[source])
        cache.add_sequence(0)
        with cache.forward([0], [9]):
            for layer in range(4):
                cache.attention(layer, normal((9, NUM_QO_HEADS + 2 * NUM_KV_HEADS, DIM), "f4"))
        rows = [x.numpy() for x in cache.debug_get_kv(0)]
        cache.save(tmp_path / source)
        for target, config in configs.items():
            again = pkv.create(config)
            if target != source:
                with pytest.raises(ValueError, match="convert=True"):
                    again.load(tmp_path / source)
            again.load(tmp_path / source, convert=True)
            is_same = target in (source, "plain")
            found = [x.numpy() for x in again.debug_get_kv(0)]
            for plane, layer in np.ndindex(2, 4):
                static = config.resolved().layers[layer].kv_scales
                static = None if static is None else np.array(static[plane], "f4")
                want = rows[plane][layer]
                want = want if is_same else keep(codec_of("int8"), want, static=static)
                np.testing.assert_array_equal(found[plane][layer], want)


def test_transfers_know_the_scales():
    one, other = local_channels()
    Sender(pkv.create(config_of()), one)
    with pytest.raises(ValueError, match=r"layers\[0\].kv_scales is '\w+' here and '\w+' there"):
        Receiver(pkv.create(config_of(scales=[(0.01, 0.03), *SCALES[1:]])), other)
    one, other = local_channels()
    Sender(pkv.create(config_of(scales=[None] * 4)), one)
    with pytest.raises(ValueError, match=r"layers\[0\].kv_scales is '\w+' here and None there"):
        Receiver(pkv.create(config_of()), other)


@pytest.mark.parametrize(
    "scales, message",
    [
        (0.1, "a pair"),
        ((0.1,), "a pair"),
        (("a", 0.1), "numbers"),
        ((0.1, True), "numbers"),
        (((), 0.1), "numbers"),
        ((0.1, 0.0), "positive numbers"),
        ((0.1, -1.0), "positive numbers"),
        ((float("nan"), 0.1), "positive numbers"),
        ((0.1, (0.1, float("inf"))), "positive numbers"),
        ((0.1, 1e-39), "positive numbers"),
        (((0.1, 0.1, 0.1), 0.1), "3 scales for 2 KV heads"),
        ({0.1, 0.2}, "a pair"),
        (b"\x01\x02", "a pair"),
        (np.array(0.1), "a pair"),
        (((True, True), 0.1), "numbers"),
        ((0.1, {0.1}), "numbers"),
        ((10**400, 0.1), "positive numbers"),
    ],
)
def test_what_is_no_scale(scales, message):
    with pytest.raises((ValueError, TypeError), match=message):
        config_of(scales=[scales] * 4).resolved()


def test_layers_without_such_scales():
    config = config_of(scales=[None] * 4)
    for kv_dtype in ("float16", "int4", ("int8", "int4")):
        layer = pkv.LayerSpec(kv_scales=(1, 1), kv_dtype=kv_dtype)
        with pytest.raises(ValueError, match="kv_scales are for kv_dtype"):
            replace(config, layers=[layer] * 4).resolved()
    for kind in ("mla", "linear", "index"):
        with pytest.raises(ValueError, match="kv_scales is for kinds mha"):
            pkv.LayerSpec(kind, kv_scales=(1, 1))


def test_wrong_tensors():
    """The runtime checks the scales that other callers pass."""
    scales = np.ones((2, 2), "float32")
    plain = make_config(layers=[LAYER | {"kv_scales": tvm.runtime.tensor(scales)}])
    create = tvm_ffi.get_global_func("pagedkv.create")
    with pytest.raises(ValueError, match="which are for layers with K and V in quantized pages"):
        create(plain, KERNELS, tvm.cpu())
    for wrong in (scales[:1], scales[0], scales.astype("float16"), np.ones((2, 3), "float32")):
        layers = [LAYER | {"kv_scales": tvm.runtime.tensor(wrong)}]
        with pytest.raises(ValueError, match="must be a contiguous float32 tensor"):
            make_quantized(layers, "int8")
    with pytest.raises(TypeError, match="kv_scales"):
        make_quantized([LAYER | {"kv_scales": 0.5}], "int8")
    for value in (0.0, -1.0, 1e-39, np.inf, np.nan):
        scales[1, 0] = value
        layers = [LAYER | {"kv_scales": tvm.runtime.tensor(scales)}]
        with pytest.raises(ValueError, match="kv_scales of layer 0 must be positive normal number"):
            make_quantized(layers, "int8")
