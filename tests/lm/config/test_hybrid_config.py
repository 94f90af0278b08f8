# SPDX-License-Identifier: Apache-2.0
"""``config.json`` of hybrids, in old and new spellings, and what is wrong with others."""

from __future__ import annotations

import math

import pytest
import tvm.testing

from tvm_pagedkv import ConvConfig, LayerSpec, RecurrentConfig, RopeConfig
from tvm_pagedkv_lm.blocks.mixers import share_of
from tvm_pagedkv_lm.blocks.mlp import Mlp
from tvm_pagedkv_lm.families.falcon_h1 import falcon_h1
from tvm_pagedkv_lm.families.granite import granite_hybrid
from tvm_pagedkv_lm.families.kimi_linear import kimi_linear
from tvm_pagedkv_lm.families.lfm2 import lfm2
from tvm_pagedkv_lm.families.mamba2 import mamba2
from tvm_pagedkv_lm.families.pictures import with_pictures
from tvm_pagedkv_lm.families.qwen3_5 import qwen3_5
from tvm_pagedkv_lm.model.work import Work
from tvm_pagedkv_lm.parallel.parallel import check_shards

SHAPE = {
    "vocab_size": 100,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 6,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 4096,
}
MAMBA = {"num_heads": 8, "head_dim": 16}
DENSE = {"num_local_experts": 0, "mamba_n_heads": 8}


def test_qwen_has_attention_in_every_fourth_layer():
    config = qwen3_5(SHAPE)
    kinds = ["recurrent"] * 3 + ["mha"] + ["recurrent"] * 2
    assert [layer.kind for layer in config.cache_layers] == kinds
    assert config.cache_layers[0] == LayerSpec(
        "recurrent",
        recurrent=RecurrentConfig("gated_delta", 32, 16, 128, 128),
        conv=ConvConfig(8192, 4, "silu"),
    )
    assert config.cache_layers[3].rope == RopeConfig(rotary_dim=64) and config.head_dim == 256
    assert config.num_layers == 6 and config.cache_index(4) == 4
    kinds = (["linear_attention"] * 2 + ["full_attention"]) * 2
    every_third = qwen3_5(SHAPE | {"full_attention_interval": 3})
    assert qwen3_5(SHAPE | {"layer_types": kinds}) == every_third != config


def test_qwen_with_pictures_has_its_fields_below():
    whole = {"text_config": SHAPE, "vision_config": {"depth": 1}, "tie_word_embeddings": True}
    config = with_pictures(qwen3_5_text=qwen3_5)(whole)
    assert config.names.model == "model.language_model" and config.tied_embeddings
    assert config.layers == qwen3_5(SHAPE).layers


def test_lfm2_of_older_files():
    old = {
        "norm_eps": 1e-4, "full_attn_idxs": [2, 5], "block_ff_dim": 192, "block_multiple_of": 32,
        "tie_embedding": False, "conv_L_cache": 5,
    }  # fmt: skip
    config = lfm2(SHAPE | old)
    assert [layer.kind for layer in config.cache_layers] == ["conv", "conv", "mha"] * 2
    assert config.cache_layers[0].conv == ConvConfig(64, 5)
    assert config.cache_layers[2].rope.theta == 1e6
    # 2/3 of 192, up to a multiple of 32
    found = config.layers[0].mlp.width, config.norm_eps, config.tied_embeddings
    assert found == (128, 1e-4, False)
    new = {"block_auto_adjust_ff_dim": False, "layer_types": ["conv"] * 6}
    assert lfm2(SHAPE | new).layers[0].mlp.width == 96


def test_mamba2_has_no_attention_and_no_mlp():
    fields = {name: SHAPE[name] for name in ("vocab_size", "hidden_size", "num_hidden_layers")}
    limit = [0.0, {"__float__": "Infinity"}]
    config = mamba2(fields | MAMBA | {"time_step_limit": limit})
    assert config.layers == (config.layers[0],) * 6 and config.layers[0].mlp is None
    assert config.cache_layers[0].recurrent == RecurrentConfig("mamba2", 8, 8, 128, 16)
    assert config.cache_layers[0].conv == ConvConfig(128 + 2 * 8 * 128, 4, "silu", has_bias=True)
    assert config.layers[0].mixer.time_step_limit == (0.0, math.inf)


def test_falcon_has_two_layers_of_the_cache_for_one_of_the_model():
    config = falcon_h1(SHAPE | {"mamba_d_ssm": 256, "mamba_n_heads": 8, "mamba_n_groups": 2})
    assert [layer.kind for layer in config.cache_layers] == ["mha", "recurrent"] * 6
    assert config.num_layers == 6 and config.cache_index(2) == 4
    assert config.cache_layers[1].recurrent == RecurrentConfig("mamba2", 8, 2, 256, 32)


@pytest.mark.parametrize("given", [None, "nope"])
def test_granite_of_older_files(given):
    kinds = ["mamba", "mamba", "attention"] * 2
    old = granite_hybrid(SHAPE | DENSE | {"layer_types": kinds, "position_embedding_type": given})
    assert [layer.kind for layer in old.cache_layers] == ["recurrent", "recurrent", "mha"] * 2
    assert old.cache_layers[2].rope == RopeConfig("none")
    rotated = granite_hybrid(
        SHAPE | DENSE | {"layers_block_type": kinds, "position_embedding_type": "rope"}
    )
    assert rotated.cache_layers[2].rope == RopeConfig(rotary_dim=16)


KIMI = {
    "linear_attn_config": {
        "full_attn_layers": [4, 6],
        "kda_layers": [1, 2, 3, 5],
        "head_dim": 32,
        "num_heads": 4,
        "short_conv_kernel_size": 3,
    },
    "head_dim": 72,
    "kv_lora_rank": 48,
    "mla_use_nope": True,
    "model_max_length": 1000,
    "moe_renormalize": True,
    "num_expert_group": 1,
    "num_experts": 16,
    "num_experts_per_token": 4,
    "num_shared_experts": 1,
    "moe_intermediate_size": 24,
    "first_k_dense_replace": 1,
    "rope_scaling": None,
}


def test_kimi_linear_in_the_spelling_of_its_makers():
    shape = {name: SHAPE[name] for name in SHAPE if name != "max_position_embeddings"}
    config = kimi_linear(shape | KIMI)
    kinds = ["recurrent"] * 3 + ["mla", "recurrent", "mla"]
    assert [layer.kind for layer in config.cache_layers] == kinds
    assert config.cache_layers[0] == LayerSpec(
        "recurrent", recurrent=RecurrentConfig("kda", 4, 4, 32, 32), conv=ConvConfig(384, 3, "silu")
    )
    assert config.cache_layers[3].rope == RopeConfig("none")
    experts = config.layers[1].mlp.experts
    assert [isinstance(layer.mlp, Mlp) for layer in config.layers] == [True] + [False] * 5
    assert (experts.num_experts, experts.num_chosen) == (16, 4)
    assert (experts.scale, experts.shared_width, config.context_length) == (2.446, 24, 1000)
    newer = {
        "layer_types": [
            {"recurrent": "linear_attention", "mla": "full_attention"}[kind] for kind in kinds
        ],
        "mlp_layer_types": ["dense"] + ["sparse"] * 5,
        "linear_head_dim": 32,
        "linear_num_heads": 4,
        "linear_conv_kernel_dim": 3,
        "max_position_embeddings": 1000,
        "num_local_experts": 16,
        "num_experts_per_tok": 4,
        "kv_lora_rank": 48,
        "moe_intermediate_size": 24,
    }
    assert kimi_linear(SHAPE | newer) == config
    kinds = [layer.kind for layer in kimi_linear(SHAPE | {"num_hidden_layers": 10}).cache_layers]
    assert kinds == ["recurrent"] * 4 + ["mla"] + ["recurrent"] * 3 + ["mla", "recurrent"]


@pytest.mark.parametrize(
    ("reader", "fields", "message"),
    [
        (kimi_linear, {"mla_use_nope": False}, "mla_use_nope must be True in Kimi Linear, got Fal"),
        (kimi_linear, {"linear_attn_config": 3}, "linear_attn_config must be an object, got 3"),
        (kimi_linear, {"linear_attn_config": {"full_attn_layers": [1], "kda_layers": [2, 3]}},
         r"kda_layers must list each layer from 1 to 6 once, got \[1\] and \[2, 3\]"),
        (kimi_linear, {"mlp_layer_types": ["dense"]}, "must list dense or sparse for 6 layers"),
        (kimi_linear, {"linear_num_heads": 0}, "linear_num_heads must be a positive integer"),
        (qwen3_5, {"layer_types": ["conv"] * 6}, "layer_types must be of 'full_attention' and 'li"),
        (qwen3_5, {"linear_num_value_heads": 24}, r"num_heads \(24\) must be a multiple of recur"),
        (with_pictures(qwen3_5_text=qwen3_5), {}, "text_config must be an object, got None"),
        (lfm2, {"conv_L_cache": 1}, "conv.width must be between 2 and"),
        (lfm2, {"block_multiple_of": 0}, "block_multiple_of must be a positive integer, got 0"),
        (mamba2, {}, "128 heads of width 64 must be 128 together"),
        (mamba2, MAMBA | {"time_step_limit": [1]}, "time_step_limit must be two numbers"),
        (mamba2, MAMBA | {"hidden_act": "gelu"}, "hidden_act 'gelu' is not supported"),
        (falcon_h1, {"ssm_multipliers": [1, 2]}, "ssm_multipliers must be 5 numbers, got"),
        (falcon_h1, {"mamba_proj_bias": True}, "mamba_proj_bias is not supported in Falcon-H1"),
        (granite_hybrid, {}, "Granite 4 with experts is not supported; it has 8"),
        (granite_hybrid, DENSE | {"attention_bias": True}, "attention_bias is not supported in Gr"),
    ],
)  # fmt: skip
def test_errors(reader, fields, message):
    with pytest.raises(ValueError, match=message):
        reader(SHAPE | fields)


@pytest.mark.parametrize(
    ("config", "num_shards", "message"),
    [
        (
            qwen3_5(SHAPE | {"num_attention_heads": 3, "num_key_value_heads": 3}),
            3,
            r"must divide the heads of a recurrent layer \(32\) of the model, got 3",
        ),
        (
            qwen3_5(SHAPE | {"linear_num_key_heads": 16, "linear_num_value_heads": 48}
                    | {"num_attention_heads": 3, "num_key_value_heads": 3}),
            3,
            r"must divide the key heads of a recurrent layer \(16\)",
        ),
    ],
)  # fmt: skip
def test_workers_divide_heads(config, num_shards, message):
    with pytest.raises(ValueError, match=message):
        check_shards(config, num_shards)


def test_a_single_head_of_keys_is_with_every_worker():
    own = share_of(qwen3_5(SHAPE | {"linear_num_key_heads": 1}).cache_layers[0], 4)
    assert own.recurrent == RecurrentConfig("gated_delta", 8, 1, 128, 128)
    assert own.conv == ConvConfig((8 + 2) * 128, 4, "silu")
    assert share_of(qwen3_5(SHAPE).cache_layers[0], 4).conv == ConvConfig(
        (8 + 2 * 4) * 128, 4, "silu"
    )


def test_work_counts_states():
    """Two of three layers have a state, which a step reads and writes; one has K and V."""
    state = {"linear_num_value_heads": 4, "linear_num_key_heads": 2}
    kinds = ["linear_attention"] * 2 + ["full_attention"]
    config = qwen3_5(SHAPE | state | {"num_hidden_layers": 3, "layer_types": kinds})
    numbers = 2 * 4 * 128 * 128
    work = Work(config, 2)
    assert work.num_bytes(30, [10, 20]) - work.num_bytes(0, []) == (
        2 * 2 * 4 * numbers + 30 * 2 * 2 * 256 * 2
    )
    assert work.flops([(7, 1)], 0) == (
        2 * work.layer_weights + 5 * numbers + 4 * 8 * config.num_heads * config.head_dim
    )


if __name__ == "__main__":
    tvm.testing.main()
