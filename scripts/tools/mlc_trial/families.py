# SPDX-License-Identifier: Apache-2.0
"""The model families that are tried, each with the configuration of a small random checkpoint."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

_SIZE = {
    "vocab_size": 256,
    "hidden_size": 128,
    "intermediate_size": 192,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 4096,
    "tie_word_embeddings": False,
}
_GROUPED = {**_SIZE, "num_key_value_heads": 2}
_GPT = {
    "vocab_size": 256,
    "n_embd": 128,
    "n_layer": 2,
    "n_head": 4,
    "n_inner": 192,
    "n_positions": 2048,
    "tie_word_embeddings": False,
}
_GEMMA2 = {
    **_GROUPED,
    "head_dim": 32,
    "tie_word_embeddings": True,
    "query_pre_attn_scalar": 32,
    "attn_logit_softcapping": 5.0,
    "final_logit_softcapping": 30.0,
}


def _rope(rope_type: str, **parameters: Any) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": rope_type, "rope_theta": 10000.0, **parameters}}


_DEEPSEEK = {
    **_SIZE,
    "num_key_value_heads": 4,
    "first_k_dense_replace": 2,
    "q_lora_rank": 48,
    "kv_lora_rank": 64,
    "qk_nope_head_dim": 32,
    "qk_rope_head_dim": 16,
    "v_head_dim": 32,
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 64,
    **_rope(
        "yarn",
        factor=1.0,  # mlc-llm rotates by TVM's YaRN, whose upper half of dimensions is wrong
        original_max_position_embeddings=1024,
        beta_fast=32.0,
        beta_slow=1.0,
        attention_factor=1.0,
    ),
}
_LLAMA4_ROPE = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
_LLAMA4 = {
    **_GROUPED,
    "num_hidden_layers": 4,
    "head_dim": 32,
    "intermediate_size_mlp": 192,
    "num_local_experts": 4,
    "num_experts_per_tok": 1,
    "interleave_moe_layer_step": 1,
    "use_qk_norm": True,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "rope_parameters": {"rope_theta": 10000.0, **_LLAMA4_ROPE},
}
_DEEPSEEK_MLC = {"scoring_func": "softmax", "moe_layer_freq": 1}


@dataclass(frozen=True)
class Family:
    """One family as transformers and as mlc-llm know it.

    Parameters
    ----------
    kind : str
        ``model_type`` in transformers.
    fields : dict
        Of its configuration.
    mlc : str, optional
        The name in mlc-llm, where it has another one.
    mlc_fields : dict
        What mlc-llm's configuration needs besides.
    rename : (str, str)
        What weights' names begin with in transformers, and in published checkpoints.
    window : int, optional
        The sliding window that mlc-llm gives each sequence.
    has_trees : bool
        False where mlc-llm's model cannot run a token tree.
    decodes_batches : bool
        False where mlc-llm's ``batch_decode`` is right only for sequences of equal length.
    decodes_equal_batches : bool
        False where it takes one sequence.
    is_hybrid : bool
        True where an RNN state goes beside the cache. Prefill takes one sequence then.
    quantization : str
        Of mlc-llm. Weights of 4 bits are drawn so that none is rounded.
    """

    kind: str
    fields: dict[str, Any]
    mlc: str | None = None
    mlc_fields: dict[str, Any] = field(default_factory=dict)
    rename: tuple[str, str] = ("", "")
    window: int | None = None
    has_trees: bool = True
    decodes_batches: bool = True
    decodes_equal_batches: bool = True
    is_hybrid: bool = False
    quantization: str = "q0f32"

    @property
    def vocab_size(self) -> int:
        return self.fields["vocab_size"]

    @property
    def mlc_name(self) -> str:
        return self.mlc or self.kind


FAMILIES = {
    "llama": Family("llama", _GROUPED),
    "llama-4-bit": Family("llama", _GROUPED, quantization="q4f32_1"),
    "llama3-rope": Family(
        "llama",
        _GROUPED
        | _rope(
            "llama3",
            factor=8.0,
            low_freq_factor=1.0,
            high_freq_factor=4.0,
            original_max_position_embeddings=32,
        ),
    ),
    "mistral": Family("mistral", _GROUPED | {"sliding_window": 4096}),
    "mistral-window": Family(
        "mistral",
        _GROUPED | {"sliding_window": 24},
        mlc_fields={"sliding_window_size": 24, "attention_sink_size": 0},
        window=24,
        has_trees=False,
    ),
    "ministral3-yarn": Family(
        "ministral3",
        _GROUPED
        | {"head_dim": 32}
        | _rope(
            "yarn",
            factor=4.0,
            original_max_position_embeddings=1024,
            beta_fast=32.0,
            beta_slow=1.0,
            mscale=1.0,
            mscale_all_dim=1.0,
            llama_4_scaling_beta=0.0,
        ),
    ),
    "qwen2": Family("qwen2", _GROUPED),
    "qwen3": Family("qwen3", _GROUPED | {"head_dim": 32}),
    "qwen3_5": Family(
        "qwen3_5_text",
        _GROUPED
        | {
            "num_hidden_layers": 4,
            "head_dim": 32,
            "linear_num_key_heads": 2,
            "linear_num_value_heads": 4,
            "linear_key_head_dim": 32,
            "linear_value_head_dim": 48,
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 10000.0,
                "partial_rotary_factor": 0.25,
            },
        },
        mlc="qwen3_5",
        rename=("model.", "model.language_model."),
        has_trees=False,
        is_hybrid=True,
    ),
    "gemma": Family("gemma", _GROUPED | {"head_dim": 32, "tie_word_embeddings": True}),
    "gemma2": Family("gemma2", _GEMMA2 | {"sliding_window": 4096}),
    "gemma2-window": Family("gemma2", _GEMMA2 | {"sliding_window": 24}),
    "gemma3": Family(
        "gemma3_text",
        _GROUPED
        | {
            "num_hidden_layers": 6,
            "head_dim": 32,
            "tie_word_embeddings": True,
            "sliding_window": 24,
            "query_pre_attn_scalar": 32,
            "rope_parameters": {
                "full_attention": {"rope_type": "default", "rope_theta": 10000.0},
                "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
            },
        },
    ),
    "phi": Family("phi", _SIZE | {"num_key_value_heads": 4}),
    "phi3": Family("phi3", _GROUPED | {"sliding_window": None, "pad_token_id": 0}),
    "phi3-longrope": Family(
        "phi3",
        _GROUPED
        | {
            "sliding_window": None,
            "pad_token_id": 0,
            "max_position_embeddings": 4096,
            "original_max_position_embeddings": 2048,
        }
        | _rope(
            "longrope",
            short_factor=[1.0 + 0.05 * i for i in range(16)],
            long_factor=[1.0 + 0.5 * i for i in range(16)],
            original_max_position_embeddings=2048,
        ),
    ),
    "gpt_neox": Family("gpt_neox", _SIZE | {"hidden_act": "gelu"}),
    "gpt2": Family(
        "gpt2",
        _GPT | {"tie_word_embeddings": True},
        rename=("transformer.", ""),
        decodes_batches=False,
        decodes_equal_batches=False,
    ),
    "gpt_bigcode": Family(
        "gpt_bigcode",
        _GPT | {"multi_query": True, "activation_function": "gelu_pytorch_tanh"},
        decodes_batches=False,
        decodes_equal_batches=False,
    ),
    "stablelm": Family("stablelm", _GROUPED | {"use_qkv_bias": True}),
    "starcoder2": Family(
        "starcoder2", _GROUPED | {"sliding_window": None, "tie_word_embeddings": True}
    ),
    "cohere": Family("cohere", _GROUPED | {"logit_scale": 1.0, "tie_word_embeddings": True}),
    "olmo": Family("olmo", _GROUPED),
    "olmo2": Family("olmo2", _GROUPED),
    "nemotron": Family("nemotron", _GROUPED | {"hidden_act": "relu2"}),
    "internlm": Family(
        "llama",
        _SIZE | {"num_key_value_heads": 4, "attention_bias": True},
        mlc="internlm",
        mlc_fields={"bias": True},
    ),
    "mixtral": Family(
        "mixtral", _GROUPED | {"head_dim": 32, "num_local_experts": 4, "num_experts_per_tok": 2}
    ),
    "mixtral-4-bit": Family(
        "mixtral",
        _GROUPED | {"head_dim": 32, "num_local_experts": 4, "num_experts_per_tok": 2},
        quantization="q4f32_1",
    ),
    "qwen2_moe": Family(
        "qwen2_moe",
        _GROUPED
        | {
            "num_experts": 6,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 64,
            "shared_expert_intermediate_size": 96,
            "norm_topk_prob": False,
        },
    ),
    "qwen3_moe": Family(
        "qwen3_moe",
        _GROUPED
        | {
            "head_dim": 32,
            "num_experts": 6,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 64,
            "norm_topk_prob": True,
        },
        mlc_fields={"num_experts": 6, "decoder_sparse_step": 1},
    ),
    "deepseek_v2": Family(
        "deepseek_v2", _DEEPSEEK, mlc_fields=_DEEPSEEK_MLC, decodes_batches=False
    ),
    "deepseek_v2-experts": Family(
        "deepseek_v2",
        _DEEPSEEK | {"first_k_dense_replace": 1, "topk_method": "greedy"},
        mlc_fields=_DEEPSEEK_MLC,
        decodes_batches=False,
    ),
    "deepseek_v2-groups": Family(
        "deepseek_v2",
        _DEEPSEEK
        | {
            "first_k_dense_replace": 1,
            "topk_method": "group_limited_greedy",
            "n_routed_experts": 8,
            "n_group": 4,
            "topk_group": 2,
        },
        mlc_fields=_DEEPSEEK_MLC,
        decodes_batches=False,
    ),
    "llama4": Family(
        "llama4_text",
        _LLAMA4,
        mlc="llama4",
        mlc_fields={"text_config": _LLAMA4 | {"use_qk_norm": True, "rope_scaling": _LLAMA4_ROPE}},
        rename=("", "language_model."),
        decodes_batches=False,
        decodes_equal_batches=False,
    ),
    "deepseek_v3": Family(
        "deepseek_v3",
        _DEEPSEEK
        | {
            "first_k_dense_replace": 1,
            "n_routed_experts": 8,
            "n_group": 4,
            "topk_group": 2,
            "norm_topk_prob": True,
            "routed_scaling_factor": 1.5,
        },
        mlc_fields=_DEEPSEEK_MLC | {"scoring_func": "sigmoid", "topk_method": "noaux_tc"},
        decodes_batches=False,
    ),
}
