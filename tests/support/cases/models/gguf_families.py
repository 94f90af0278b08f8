# SPDX-License-Identifier: Apache-2.0
"""Small models of every family that GGUF files hold, with what only the files have."""

from __future__ import annotations

import numpy as np

HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}
SHAPE = HEADS | {"hidden_size": 64, "intermediate_size": 80, "vocab_size": 300}
LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "partial_rotary_factor": 0.75,
    "original_max_position_embeddings": 32,
    "short_factor": [1.0, 1.1, 1.2, 1.4, 1.7, 2.0],
    "long_factor": [1.5, 2.0, 4.0, 9.0, 15.0, 24.0],
}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


def llama3_factors(scaling: dict, dim: int) -> np.ndarray:
    """The tensor rope_freqs.weight, by the wave lengths as llama.cpp writes it."""
    factors = []
    for i in range(0, dim, 2):
        length = 2 * np.pi * scaling["rope_theta"] ** (i / dim)
        turns = scaling["original_max_position_embeddings"] / length
        if turns > scaling["high_freq_factor"]:
            factors.append(1.0)
        elif turns < scaling["low_freq_factor"]:
            factors.append(scaling["factor"])
        else:
            span = scaling["high_freq_factor"] - scaling["low_freq_factor"]
            smooth = (turns - scaling["low_freq_factor"]) / span
            factors.append(1 / ((1 - smooth) / scaling["factor"] + smooth))
    return np.float32(factors)


BOTH_KINDS = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 7}

OF_GEMMA = {
    "num_hidden_layers": 3,
    "num_kv_shared_layers": 1,
    "sliding_window": 7,
    "vocab_size_per_layer_input": 300,
    "hidden_size_per_layer_input": 16,
    "final_logit_softcapping": 4.0,
}
OF_GEMMA4 = {
    "layer_types": ["sliding_attention", "full_attention", "full_attention"],
    "global_head_dim": 32,
    "rope_parameters": {
        "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
        "full_attention": {
            "rope_type": "proportional",
            "rope_theta": 1e6,
            "partial_rotary_factor": 0.25,
        },
    },
}
OF_DEEPSEEK = {
    "num_key_value_heads": 4,
    "kv_lora_rank": 32,
    "qk_rope_head_dim": 8,
    "head_dim": 8,
    "qk_nope_head_dim": 16,
    "v_head_dim": 24,
    "first_k_dense_replace": 1,
    "n_routed_experts": 8,
    "n_shared_experts": 2,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 32,
    "routed_scaling_factor": 1.5,
    "n_group": 4,
    "topk_group": 2,
    "topk_method": "group_limited_greedy",
    "rope_parameters": {
        "rope_type": "yarn",
        "rope_theta": 1e4,
        "factor": 8.0,
        "original_max_position_embeddings": 32,
        "mscale": 0.707,
        "mscale_all_dim": 0.707,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
    },
}

# Model type, fields of config.json, and what only a GGUF file has: keys and tensors.
CASES = {
    "llama": ("llama", {}, {}, {}),
    "llama, biases": ("llama", {"attention_bias": True, "mlp_bias": True}, {}, {}),
    "llama, tied": ("llama", {"tie_word_embeddings": True}, {}, {}),
    "llama 3": (
        "llama",
        {"rope_parameters": LLAMA3, "head_dim": 32},
        {".rope.dimension_count": 32},
        {"rope_freqs.weight": llama3_factors(LLAMA3, 32)},
    ),
    "llama, linear": (
        "llama",
        {"rope_parameters": {"rope_type": "linear", "factor": 4.0, "rope_theta": 1e4}},
        {".rope.scaling.type": "linear", ".rope.scaling.factor": 4.0},
        {},
    ),
    "qwen2": ("qwen2", {"tie_word_embeddings": True}, {}, {}),
    "qwen2, yarn": (
        "qwen2",
        {
            "rope_parameters": {
                "rope_type": "yarn",
                "factor": 4.0,
                "original_max_position_embeddings": 64,
                "rope_theta": 1e6,
            }
        },
        {
            ".rope.scaling.type": "yarn",
            ".rope.scaling.factor": 4.0,
            ".rope.scaling.original_context_length": 64,
        },
        {},
    ),
    "qwen3": ("qwen3", {"hidden_size": 48}, {}, {}),
    "gemma2": ("gemma2", {"sliding_window": 7, "query_pre_attn_scalar": 16}, {}, {}),
    "gemma2 27B": (
        "gemma2",
        {"sliding_window": 7, "query_pre_attn_scalar": 16, "head_dim": 32, "num_hidden_layers": 46},
        {},
        {},
    ),
    "gemma3": (
        "gemma3_text",
        {
            "num_hidden_layers": 7,
            "sliding_window": 7,
            "query_pre_attn_scalar": 16,
            "layer_types": ["sliding_attention"] * 5 + ["full_attention", "sliding_attention"],
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
                "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
            },
        },
        {".rope.scaling.type": "linear", ".rope.scaling.factor": 8.0},
        {},
    ),
    "gemma3, newer keys": (
        "gemma3_text",
        {
            "sliding_window": 7,
            "query_pre_attn_scalar": 25,
            "layer_types": ["full_attention", "sliding_attention"],
            "rope_parameters": {
                "full_attention": {"rope_type": "default", "rope_theta": 1e6},
                "sliding_attention": {"rope_type": "default", "rope_theta": 2e4},
            },
        },
        {
            ".rope.freq_base_swa": 2e4,
            ".attention.sliding_window_pattern": [False, True],
            ".attention.scale": 0.2,
        },
        {},
    ),
    "phi3": (
        "phi3",
        {"rope_parameters": LONGROPE, "original_max_position_embeddings": 32},
        {".rope.dimension_count": 12, ".rope.scaling.original_context_length": 32},
        {
            "rope_factors_long.weight": np.float32(LONGROPE["long_factor"]),
            "rope_factors_short.weight": np.float32(LONGROPE["short_factor"]),
        },
    ),
    "phi3, window": ("phi3", {"sliding_window": 9}, {}, {}),
    "olmo2": ("olmo2", {}, {}, {}),
    "olmo3, yarn": (
        "olmo3",
        {
            **BOTH_KINDS,
            "rope_parameters": {
                "full_attention": {
                    "rope_type": "yarn",
                    "factor": 8.0,
                    "original_max_position_embeddings": 32,
                    "rope_theta": 5e5,
                },
                "sliding_attention": {"rope_type": "default", "rope_theta": 5e5},
            },
        },
        {
            ".attention.sliding_window_pattern": [True, False],
            ".rope.scaling.type": "yarn",
            ".rope.scaling.factor": 8.0,
            ".rope.scaling.original_context_length": 32,
        },
        {},
    ),
    "smollm3": ("smollm3", {"num_hidden_layers": 4}, {}, {}),
    "cohere2": (
        "cohere2",
        {**BOTH_KINDS, "num_hidden_layers": 4, "layer_types": None, "logit_scale": 0.5},
        {".rope.scaling.type": "none", ".rope.dimension_count": 16},
        {},
    ),
    "exaone4": ("exaone4", BOTH_KINDS, {".attention.sliding_window_pattern": [True, False]}, {}),
    "exaone4, no windows": (
        "exaone4",
        {"sliding_window": None, "layer_types": ["full_attention"] * 2},
        {},
        {},
    ),
    "mixtral": (
        "mixtral",
        {"num_local_experts": 5, "num_experts_per_tok": 2},
        {".expert_gating_func": 1},
        {},
    ),
    "qwen3 with experts": (
        "qwen3_moe",
        {
            "num_experts": 8,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 48,
            "norm_topk_prob": True,
        },
        {},
        {},
    ),
    "glm-4.5": (
        "glm4_moe",
        {
            "partial_rotary_factor": 0.5,
            "attention_bias": True,
            "use_qk_norm": True,
            "n_routed_experts": 8,
            "num_experts_per_tok": 3,
            "n_shared_experts": 2,
            "moe_intermediate_size": 32,
            "routed_scaling_factor": 2.5,
            "norm_topk_prob": True,
            "first_k_dense_replace": 1,
        },
        # Of a third layer, which predicts tokens further on and is left out.
        {".rope.dimension_count": 8, ".block_count": 3, ".nextn_predict_layers": 1},
        {"blk.2.nextn.enorm.weight": np.ones(64, np.float32)},
    ),
    "gpt-oss": (
        "gpt_oss",
        {
            "intermediate_size": 64,
            "num_local_experts": 6,
            "num_experts_per_tok": 3,
            "sliding_window": 7,
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 1e4,
                "factor": 8.0,
                "truncate": False,
                "original_max_position_embeddings": 32,
            },
        },
        {
            ".rope.scaling.type": "yarn",
            ".rope.scaling.factor": 8.0,
            ".rope.scaling.original_context_length": 32,
        },
        {},
    ),
    "gemma 3n": (
        "gemma3n_text",
        {
            **OF_GEMMA,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
            "intermediate_size": [80, 96, 80],
            "activation_sparsity_pattern": [0.9, 0.0, 0.6],
            "laurel_rank": 8,
            "altup_num_inputs": 3,
            "altup_active_idx": 1,
        },
        {},
        {},
    ),
    "gemma 4": (
        "gemma4_text",
        {**OF_GEMMA, **OF_GEMMA4, "use_double_wide_mlp": True},
        {},
        {},
    ),
    "gemma 4, K is V and experts": (
        "gemma4_text",
        {
            **OF_GEMMA,
            **OF_GEMMA4,
            "num_kv_shared_layers": 0,
            "hidden_size_per_layer_input": 0,
            "attention_k_eq_v": True,
            "num_global_key_value_heads": 1,
            "enable_moe_block": True,
            "num_experts": 4,
            "top_k_experts": 2,
            "moe_intermediate_size": 32,
        },
        {},
        {},
    ),
    "deepseek v2": ("deepseek_v2", {**OF_DEEPSEEK, "q_lora_rank": None}, {}, {}),
    "deepseek v3": ("deepseek_v3", {**OF_DEEPSEEK, "q_lora_rank": 24}, {}, {}),
    "glm 4.7 flash": (  # with a third layer, which is left out
        "deepseek_v3",
        {**OF_DEEPSEEK, "q_lora_rank": 24},
        {".block_count": 3, ".nextn_predict_layers": 1},
        {"blk.2.nextn.enorm.weight": np.ones(64, np.float32)},
    ),
}
