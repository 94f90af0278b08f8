# SPDX-License-Identifier: Apache-2.0
"""Mixtures of experts in GGUF files: keys, names and layout of their tensors.

A tensor has the matrices of all experts of a layer, whatever the family.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..config.expert_config import ExpertNames
from .metadata import Metadata

NAMES = ExpertNames(is_stacked=True)
# Tensors of a layer -> names of `NAMES`. Those of the experts have no ".weight" there.
TENSORS = {
    "ffn_gate_inp": "mlp.gate",
    "exp_probs_b": "mlp.gate.e_score_correction",
    "ffn_gate_exps": "mlp.experts.gate_proj",
    "ffn_up_exps": "mlp.experts.up_proj",
    "ffn_down_exps": "mlp.experts.down_proj",
    "ffn_gate_shexp": "mlp.shared_experts.gate_proj",
    "ffn_up_shexp": "mlp.shared_experts.up_proj",
    "ffn_down_shexp": "mlp.shared_experts.down_proj",
}
_SOFTMAX, _SIGMOID, _SOFTMAX_OF_CHOSEN = 1, 2, 3  # of `expert_gating_func`


def tensor_name(layer: str, stem: str, kind: str) -> str:
    """Return the name of a tensor of `TENSORS`, of kind "weight" or "bias"."""
    name = f"model.layers.{layer}.{TENSORS[stem]}"
    if stem.endswith("_exps"):
        return name if kind == "weight" else f"{name}_bias"
    return f"{name}_bias" if stem == "exp_probs_b" else f"{name}.{kind}"


def mixtral(metadata: Metadata) -> dict[str, Any]:
    """Return the fields of Mixtral, whose files have the architecture of Llama."""
    counts = _counts(metadata, "num_local_experts", _SOFTMAX)
    return {"architectures": ["MixtralForCausalLM"], **counts}


def qwen3_moe(metadata: Metadata) -> dict[str, Any]:
    """Return the fields of Qwen3 with experts, whose files leave out that scores are divided."""
    return {
        **_counts(metadata, "num_experts", _SOFTMAX),
        "moe_intermediate_size": metadata.of_model("expert_feed_forward_length", int),
        "norm_topk_prob": metadata.of_model("expert_weights_norm", bool, True),
    }


def glm4_moe(metadata: Metadata) -> dict[str, Any]:
    """Return the fields of GLM-4.5 to 4.7."""
    return _in_groups(metadata, _SIGMOID)


def deepseek2(metadata: Metadata, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, Any]:
    """Return the fields of DeepSeek V2, or of V3 where scores are sigmoids.

    Files of GLM-4.7-Flash leave out how experts are chosen. Only with sigmoids are scores corrected
    for the choice, so its tensors tell.
    """
    is_corrected = any(name.endswith(".exp_probs_b.bias") for name in shapes)
    default = _SIGMOID if is_corrected else _SOFTMAX
    is_v3 = (metadata.of_model("expert_gating_func", int, 0) or default) == _SIGMOID
    if is_v3:
        return {"architectures": ["DeepseekV3ForCausalLM"], **_in_groups(metadata, _SIGMOID)}
    own = _in_groups(metadata, _SOFTMAX)
    own["topk_method"] = "group_limited_greedy" if own["n_group"] > 1 else "greedy"
    return own


def gpt_oss(metadata: Metadata) -> dict[str, Any]:
    """Return the fields of the experts of GPT-OSS."""
    width = metadata.of_model("expert_feed_forward_length", int)
    counts = _counts(metadata, "num_local_experts", _SOFTMAX_OF_CHOSEN)
    return {**counts, "intermediate_size": width}


def _in_groups(metadata: Metadata, gating: int) -> dict[str, Any]:
    """Return the fields of experts in groups, some of which may be chosen among."""
    return {
        **_counts(metadata, "n_routed_experts", gating),
        "moe_intermediate_size": metadata.of_model("expert_feed_forward_length", int),
        "n_shared_experts": metadata.of_model("expert_shared_count", int),
        "n_group": metadata.of_model("expert_group_count", int, 0) or 1,
        "topk_group": metadata.of_model("expert_group_used_count", int, 0) or 1,
        "first_k_dense_replace": metadata.of_model("leading_dense_block_count", int, 0),
        "routed_scaling_factor": metadata.of_model("expert_weights_scale", float, 0) or 1.0,
        "norm_topk_prob": metadata.of_model("expert_weights_norm", bool, False),
    }


def _counts(metadata: Metadata, name: str, gating: int) -> dict[str, Any]:
    """Return the experts of a layer and of a token, after a check of how they are chosen."""
    found = metadata.of_model("expert_gating_func", int, 0)
    if found not in (0, gating):  # 0: as the architecture has it
        key = f"{metadata.architecture}.expert_gating_func"
        raise ValueError(f"{key} must be {gating}, got {found}")
    return {
        name: metadata.of_model("expert_count", int),
        "num_experts_per_tok": metadata.of_model("expert_used_count", int),
    }
