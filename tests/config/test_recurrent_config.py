# SPDX-License-Identifier: Apache-2.0
"""Layers with a state in a configuration: what is refused, and what follows from the rest."""

from __future__ import annotations

from dataclasses import replace

import pytest
import tvm.testing

import tvm_pagedkv as pkv
from tir_kernels.recurrent_spec import RULES, RecurrentSpec
from tvm_pagedkv.bundle.load import describe_config, read_config
from tvm_pagedkv.config import RECURRENT_RULES

STATE = pkv.RecurrentConfig("gated_delta", 4, 2, 16, 32)
CONV = pkv.ConvConfig(192, 4, "silu")
RECURRENT = pkv.LayerSpec("recurrent", recurrent=STATE, conv=CONV)


def config_of(*layers: pkv.LayerSpec, **changes: object) -> pkv.KVCacheConfig:
    fields = {"num_qo_heads": 4, "num_kv_heads": 2, "qk_head_dim": 32, "layers": layers}
    return pkv.KVCacheConfig(**{"num_layers": len(layers), **fields, **changes})


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"rule": "delta"}, ValueError, "recurrent.rule must be one of gated_delta, kda, mamba2"),
        ({"num_heads": 0}, ValueError, "recurrent.num_heads must be between 1 and 4096, got 0"),
        ({"num_heads": 5}, ValueError, r"num_heads \(5\) must be a multiple of recurrent.num_key_"),
        ({"key_dim": 16.0}, TypeError, "recurrent.key_dim must be an integer, got 16.0"),
        ({"value_dim": -8}, ValueError, "recurrent.value_dim must be between 1 and 4096, got -8"),
        ({"checkpoint_tokens": 0}, ValueError, "recurrent.checkpoint_tokens must be between 1 and"),
        ({"state_dtype": "int8"}, ValueError, "recurrent.state_dtype must be one of float32, floa"),
        ({"state_dtype": None}, ValueError, "recurrent.state_dtype must be one of float32, float"),
    ],
)
def test_refused_states(changes, error, message):
    with pytest.raises(error, match=message):
        replace(STATE, **changes)


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"channels": 0}, ValueError, "conv.channels must be between 1 and"),
        ({"width": 1}, ValueError, "conv.width must be between 2 and"),
        ({"activation": "gelu"}, ValueError, "conv.activation must be one of silu; got 'gelu'"),
        ({"has_bias": 1}, TypeError, "conv.has_bias must be a bool, got 1"),
    ],
)
def test_refused_convolutions(changes, error, message):
    with pytest.raises(error, match=message):
        replace(CONV, **changes)


@pytest.mark.parametrize(
    ("fields", "error", "message"),
    [
        ({"kind": "recurrent"}, ValueError, "layer.recurrent is required for kind 'recurrent'"),
        ({"kind": "conv"}, ValueError, "layer.conv is required for kind 'conv'"),
        ({"recurrent": STATE}, ValueError, "layer.recurrent is invalid for kind 'mha'"),
        ({"conv": CONV}, ValueError, "layer.conv is invalid for kind 'mha'"),
        ({"kind": "conv", "conv": CONV, "recurrent": STATE}, ValueError, "layer.recurrent is inv"),
        ({"kind": "conv", "conv": {"width": 4}}, TypeError, "layer.conv must be a ConvConfig"),
        ({"kind": "recurrent", "recurrent": CONV}, TypeError, "must be a RecurrentConfig"),
        (
            {"kind": "recurrent", "recurrent": STATE, "kv_dtype": "int8"},
            ValueError,
            "layer.kv_dtype is not for kind 'recurrent', which keeps no K and V",
        ),
        (
            {"kind": "recurrent", "recurrent": STATE, "window": 8},
            ValueError,
            "layer.window is required for kinds 'mha_sliding' and 'mha_chunked' and invalid otherw",
        ),
    ],
)
def test_refused_layers(fields, error, message):
    with pytest.raises(error, match=message):
        pkv.LayerSpec(**fields)


def test_resolved_layers_keep_their_state_and_no_kv():
    """The other layers have the pages that they would have without them."""
    short = pkv.LayerSpec("conv", conv=pkv.ConvConfig(64, 3))
    config = config_of(RECURRENT, pkv.LayerSpec(), short, kv_dtype="int8")
    resolved = config.resolved()
    recurrent, attention, conv = resolved.layers
    assert (recurrent.recurrent, recurrent.conv) == (STATE, CONV)
    assert (conv.recurrent, conv.conv) == (None, pkv.ConvConfig(64, 3))
    assert [layer.keeps_kv for layer in resolved.layers] == [False, True, False]
    for layer in (recurrent, conv):
        assert layer.kv_dtype is None and layer.rows_per_slot == layer.page_bytes(16) == 0
        assert resolved.num_pages_of(layer) == 0
    assert attention == config_of(pkv.LayerSpec(), kv_dtype="int8").resolved().layers[0]
    assert config_of(RECURRENT, short, dtype="float32").resolved().kv_dtype == "float32"


def test_a_bundle_says_it_in_json():
    states = pkv.LayerSpec("recurrent", recurrent=replace(STATE, state_dtype="bfloat16"))
    conv = pkv.LayerSpec("conv", conv=pkv.ConvConfig(64, 3, has_bias=True))
    config = config_of(RECURRENT, conv, states)
    assert read_config(describe_config(config)) == config
    described = describe_config(config)
    described["layers"][0]["recurrent"]["heads"] = 3
    with pytest.raises(ValueError, match="recurrent has no field 'heads'; known: rule, num_heads"):
        read_config(described)


def test_checkpoints_are_as_far_apart_as_ingredients_have_the_bytes_of_the_states():
    """2 MiB of states are as much as the ingredients of 167 tokens, of 12544 bytes each."""
    large = pkv.RecurrentConfig("gated_delta", 32, 16, 128, 128)
    assert large.state_bytes == 2 << 20
    assert large.row_bytes("bfloat16") == 2 * (2048 + 4096) + 4 * (32 + 32)
    assert large.interval("bfloat16", page_size=16) == 512
    assert large.interval("bfloat16", page_size=256) == 512
    assert replace(large, checkpoint_tokens=64).interval("bfloat16", page_size=16) == 64
    narrow = replace(large, state_dtype="bfloat16")
    assert narrow.state_bytes == 1 << 20
    assert narrow.interval("bfloat16", page_size=16) == 256


@pytest.mark.parametrize("rule", RECURRENT_RULES)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_rows_of_ingredients_are_those_of_the_kernels(rule, dtype):
    sizes = (6, 2, 20, 12)
    spec = RecurrentSpec(rule, *sizes, dtype=dtype)
    itemsize = 4 if dtype == "float32" else 2
    assert pkv.RecurrentConfig(rule, *sizes).row_bytes(dtype) == spec.row_width * itemsize


def test_pages_follow_the_history():
    """Ingredients of a sequence reach back to a checkpoint, and further for the history."""
    layers = [
        pkv.LayerSpec("recurrent", recurrent=replace(STATE, checkpoint_tokens=64, **history))
        for history in ({}, {"history_tokens": 0}, {"history_tokens": 320})
    ]
    config = config_of(*layers, max_total_tokens=65536, max_num_sequences=2).resolved()
    everything, least, some = (config.num_ingredient_pages_of(layer) for layer in config.layers)
    assert everything == config.num_pages
    assert some - least == 320 // config.page_size
    assert least >= 2 * (64 + 16) // config.page_size


def test_a_window_of_sequences_does_not_limit_what_states_need():
    """A text can be longer than all positions that attention keeps."""
    state = replace(STATE, checkpoint_tokens=256)
    layers = [
        pkv.LayerSpec("recurrent", recurrent=replace(state, history_tokens=history))
        for history in (None, 0)
    ]
    sizes = {"max_total_tokens": 64, "max_num_sequences": 2, "prefill_chunk_size": 32}
    plain = config_of(*layers, **sizes).resolved()
    assert {plain.num_ingredient_pages_of(layer) for layer in plain.layers} == {plain.num_pages}
    config = config_of(*layers, sliding_window=True, **sizes).resolved()
    for layer in config.layers:
        assert config.num_ingredient_pages_of(layer) >= 2 * (256 + 16) // config.page_size


def test_checkpoints_are_at_page_boundaries():
    layer = pkv.LayerSpec("recurrent", recurrent=replace(STATE, checkpoint_tokens=8))
    with pytest.raises(ValueError, match="must be a multiple of page_size"):
        config_of(layer)
    with pytest.raises(ValueError, match="must be a power of two, got 96"):
        replace(STATE, checkpoint_tokens=96)


def test_kernels_know_the_same_rules():
    assert set(RULES) == set(RECURRENT_RULES)
    for rule in RECURRENT_RULES:
        config, spec = replace(STATE, rule=rule), RecurrentSpec(rule, 4, 2, 16, 32)
        assert config.has_channel_decay == spec.decays_by_channel
        assert config.has_beta == spec.is_delta


if __name__ == "__main__":
    tvm.testing.main()
