# SPDX-License-Identifier: Apache-2.0
"""States of recurrent layers in pages of 16 or 32 bits."""

from __future__ import annotations

from copy import copy
from dataclasses import replace

import numpy as np
import pytest
import tvm

import tvm_pagedkv as pkv
from tvm_pagedkv.compiler import config_map

from ...support.worlds.recurrent_world import NUM_TOKENS, Layer, world_config

create = tvm.get_global_func("pagedkv.create")


def test_layers_with_states_of_several_types():
    """They are groups of their own, and each is rounded by itself."""
    rng = np.random.default_rng(3)
    shape = pkv.RecurrentConfig("gated_delta", 2, 1, 16, 16, checkpoint_tokens=8)
    states = [replace(shape, state_dtype=dtype) for dtype in ("float32", "bfloat16", "float16")]
    layers = [Layer(each, pkv.ConvConfig(24, 4), "float32", rng) for each in states]
    config = pkv.KVCacheConfig(
        num_layers=3,
        num_qo_heads=1,
        num_kv_heads=1,
        qk_head_dim=8,
        dtype="float32",
        page_size=4,
        max_num_sequences=2,
        max_total_tokens=128,
        prefill_chunk_size=64,
        layers=[pkv.LayerSpec("recurrent", recurrent=x.config, conv=x.conv) for x in layers],
    )
    cache = pkv.create(config)
    assert cache.stats()["allocated_bytes"] == config.memory_bytes()
    assert [group["num_layers"] for group in cache.stats()["state_groups"]] == [1, 1, 1]
    tokens = [int(token) for token in rng.integers(NUM_TOKENS, size=60)]
    cache.add_sequence(0)
    for begin, end in ((0, 37), (37, 38), (38, 60)):
        with cache.forward([0], [end - begin]):
            for i, layer in enumerate(layers):
                o = layer.run(cache, i, tokens[begin:end])[0].numpy()
                tolerance = 3e-5 if i == 0 else 6e-2
                assert np.abs(o - layer.expected(tokens[:end])[0][begin:]).max() < tolerance
    rounded, exact = layers[1], replace_states(layers[1], "float32")
    errors = np.abs(rounded.expected(tokens)[0] - exact.expected(tokens)[0])
    assert errors.max() > 1e-3  # what the reference rounds, too


def replace_states(layer: Layer, dtype: str) -> Layer:
    """Return a layer with the same tokens and states of another type."""
    other = copy(layer)
    other.config = replace(layer.config, state_dtype=dtype)
    return other


def test_a_type_that_states_cannot_have_is_refused():
    """Also by a library's own description of a cache; none means float32."""
    config = world_config("float32", checkpoint_tokens=8)
    kernels = pkv.build(config)
    sets = [dict(each) for each in kernels.sets]
    described = config_map(config.resolved(), kernels, tvm.cpu())
    layers = [dict(layer) for layer in described["layers"]]
    for layer in layers:
        if layer["kind"] == "recurrent":
            del layer["state_dtype"]
    cache = create({**described, "layers": layers}, sets, tvm.cpu())
    assert cache.description["recurrent_layers"][0]["state_dtype"] == "float32"
    layers[1]["state_dtype"] = "int8"
    with pytest.raises(ValueError, match="state_dtype must be one of float32, float16, bfloat16"):
        create({**described, "layers": layers}, sets, tvm.cpu())


if __name__ == "__main__":
    tvm.testing.main()
