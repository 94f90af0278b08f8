# SPDX-License-Identifier: Apache-2.0
"""Layers with and without RoPE in one cache: each has a mode of its own."""

from __future__ import annotations

import numpy as np
import pytest
import tvm

import tvm_pagedkv as pkv
from tvm_pagedkv.compiler import build_libraries

from ... import reference
from ...support.cases.caches.cache_cases import MODES, ROPE, CachePair, layer_of
from ...support.cases.caches.sequence_window_cases import WindowPair
from ...support.emulators.python_kernels import (
    LAYER,
    make_cache,
    share_every_prefix,
    shuffle,
)
from ...support.emulators.python_tree_kernels import KERNELS_WITH_TREES

# Modes of the layers, and their windows.
MIXED = {
    "none, normal": (("none", "normal", "none", "normal"), (0, 0, 6, 6)),
    "none, inline": (("inline", "none", "inline", "none"), (0, 0, 6, 6)),
    "all": (("normal", "none", "inline"), (0, 5, 0)),
}


class Pair(CachePair):
    def __init__(self, name: str, seed: int = 0, kernels=None, **fields):
        modes, windows = MIXED[name]
        layers = [layer_of(w, rope_mode=MODES[m]) for m, w in zip(modes, windows, strict=True)]
        cache = make_cache(kernels, layers=layers, **{"max_total_tokens": 256, **fields})
        shuffle(cache, seed)
        expected = reference.ReferenceCache(len(modes), np.dtype("float32"), ROPE, modes, windows)
        super().__init__(cache, expected, seed)


@pytest.mark.parametrize("name", MIXED)
@pytest.mark.parametrize("page_size", [1, 8])
def test_chunks_forks_and_pops(name, page_size):
    pair = Pair(name, page_size=page_size)
    assert [x["rope_mode"] for x in pair.cache.description["layers"]] == [
        MODES[mode] for mode in MIXED[name][0]
    ]
    share_every_prefix(pair.cache)
    pair.add(0, 1)
    pair.step([0, 1], [13, 2])
    pair.fork(0, 2)
    pair.fork(0, 3, 9)
    pair.step([2, 0, 1, 3], [1, 1, 1, 1])
    pair.pop(0, 4)
    pair.pop(1, 3)
    pair.step([1, 0, 3], [7, 20, 1])
    pair.step([3, 2], [5, 18])


@pytest.mark.parametrize("name", MIXED)
def test_token_trees(name):
    """In mode "normal" and "inline" nodes are rotated by their depth."""
    pair = Pair(name, kernels=KERNELS_WITH_TREES)
    pair.add(0)
    pair.step([0], [10])
    parents = [-1, 0, 0, 1, -1]
    pair.expected.grow_trees([0], [5], parents)
    with pair.cache.forward([0], [5], parents):
        for layer in range(pair.expected.num_layers):
            pair.attend(layer, [0], [5])
    pair.cache.commit_tree([0], [3])
    pair.expected.commit_tree(0, 3)
    pair.step([0], [3])


@pytest.mark.parametrize("name", MIXED)
def test_prompts_that_begin_alike(name):
    """Pages that a removed sequence left behind have rotated K in some layers only."""
    pair = Pair(name, page_size=4)
    tokens = list(range(19))
    pair.cache.add_sequence(0, tokens)
    pair.expected.add_sequence(0)
    pair.step([0], [19])
    pair.cache.record_tokens(0, tokens)
    pair.expected.fork_sequence(0, 1, 16)
    pair.remove(0)
    assert pair.cache.add_sequence(1, [*tokens[:16], 77]) == 16
    pair.step([1], [9])
    pair.step([1], [1])


def test_beside_rows_that_the_model_rotates():
    """Calls in parts attend to a layer of mode "none" as to any other."""
    pair = Pair("none, normal")
    pair.add(0)
    pair.step([0], [7])
    with pair.cache.forward([0], [3]):
        for layer, mode in enumerate(MIXED["none, normal"][0]):
            if mode == "none":
                pair.attend_in_parts(layer, [0], [3], pair.qkv(3))
            else:
                pair.attend(layer, [0], [3])


@pytest.mark.parametrize("modes", [("none", "normal"), ("inline", "none")], ids=str)
@pytest.mark.parametrize("window, sinks", [(8, 2), (16, 0)])
def test_windows_of_sequences(modes, window, sinks):
    """They count in the text beside mode "normal", and within the window beside "inline"."""
    pair = WindowPair((0, 0), modes)
    pair.slide(window, sinks, num_decodes=5)


def test_windows_of_sequences_need_one_way_to_count():
    layers = [layer_of(0, rope_mode=mode) for mode in (1, 2)]
    with pytest.raises(ValueError, match="windows of sequences need one way to count positions"):
        make_cache(layers=layers, sliding_window=True)
    config = {
        "num_layers": 2, "num_qo_heads": 4, "num_kv_heads": 2, "qk_head_dim": 32,
        "sliding_window": True,
        "layers": [pkv.LayerSpec(rope=pkv.RopeConfig(mode)) for mode in ("normal", "inline")],
    }  # fmt: skip
    with pytest.raises(ValueError, match="sliding_window needs one way to count positions"):
        pkv.KVCacheConfig(**config)


def test_a_layer_without_a_mode_has_that_of_the_cache():
    cache = make_cache(layers=[LAYER, {**LAYER, "rope_mode": 0}], rope_mode=2)
    assert [layer["rope_mode"] for layer in cache.description["layers"]] == [2, 0]
    with pytest.raises(ValueError, match="rope_mode must be between 0 and 2, got 3"):
        make_cache(layers=[{**LAYER, "rope_mode": 3}])


def test_checkpoints_tell_modes_apart():
    """A checkpoint fits a cache whose layers rotate alike."""
    texts = set()
    for modes in ((0, 1), (1, 1), (1, 0)):
        layers = [{**LAYER, "rope_mode": mode} for mode in modes]
        texts.add(make_cache(layers=layers).description["layout"])
    assert len(texts) == 3


def test_layers_without_rope_share_kernels(monkeypatch):
    """They take the kernels of a layer like them, whatever its rotation, but for longrope."""
    built = []
    monkeypatch.setattr(
        "tvm_pagedkv.compiler.build._build_set",
        lambda spec, *_: built.append(spec) or ({}, None),
    )
    none, normal = pkv.RopeConfig("none"), pkv.RopeConfig(theta=5e5, rotary_dim=16)
    scaling = {
        "rope_type": "longrope", "short_factor": (1.0,) * 16, "long_factor": (2.0,) * 16,
        "original_max_position_embeddings": 64,
    }  # fmt: skip
    longrope = pkv.RopeConfig(scaling=scaling)
    for ropes, windows, expected in (
        ((none, normal, none), (0, 0, 0), (0, 0, 0)),
        ((none, normal), (0, 8), (0, 1)),
        ((longrope, none), (0, 0), (0, 1)),
    ):
        layers = [
            pkv.LayerSpec("mha_sliding" if w else "mha", w or None, rope=rope)
            for rope, w in zip(ropes, windows, strict=True)
        ]
        config = pkv.KVCacheConfig(
            num_layers=len(layers), num_qo_heads=4, num_kv_heads=2, qk_head_dim=32, layers=layers
        )
        assert build_libraries(config).layer_sets == expected
    assert built[0].rope.theta == 5e5


if __name__ == "__main__":
    import tvm.testing

    tvm.testing.main()
