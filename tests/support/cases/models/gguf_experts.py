# SPDX-License-Identifier: Apache-2.0
"""Experts of Hugging Face directories under the keys, names and in the layout of GGUF files."""

from __future__ import annotations

import re

import numpy as np

# Model type -> keys below the architecture, and the fields of config.json or the values they have.
EXPERT_KEYS: dict[str, dict[str, str | bool | int]] = {
    "mixtral": {
        ".expert_count": "num_local_experts",
        ".expert_used_count": "num_experts_per_tok",
    },
    "qwen3_moe": {
        ".expert_count": "num_local_experts",
        ".expert_used_count": "num_experts_per_tok",
        ".expert_feed_forward_length": "moe_intermediate_size",
    },
    "glm4_moe": {
        ".expert_count": "n_routed_experts",
        ".expert_used_count": "num_experts_per_tok",
        ".expert_feed_forward_length": "moe_intermediate_size",
        ".expert_shared_count": "n_shared_experts",
        ".expert_weights_scale": "routed_scaling_factor",
        ".expert_weights_norm": "norm_topk_prob",
        ".expert_gating_func": 2,
        ".leading_dense_block_count": "first_k_dense_replace",
    },
    "gpt_oss": {
        ".expert_count": "num_local_experts",
        ".expert_used_count": "num_experts_per_tok",
        ".expert_feed_forward_length": "intermediate_size",
    },
}
_LAYER = r"model\.layers\.(\d+)\."
_PROJECTIONS = {
    "w1": "gate", "w3": "up", "w2": "down",
    "gate_proj": "gate", "up_proj": "up", "down_proj": "down",
}  # fmt: skip
_OWN = {
    r"(?:mlp|block_sparse_moe)\.(?:gate|router)\.(weight|bias)": "ffn_gate_inp.{}",
    r"mlp\.gate\.e_score_correction_(bias)": "exp_probs_b.{}",
    r"self_attn\.(sinks)": "attn_sinks.weight",
}


def own_name(theirs: str) -> str | None:
    """Return the name of a tensor that `gguf` does not map, or that is stacked; None: another."""
    if theirs.startswith("blk."):
        return theirs
    layer = re.fullmatch(_LAYER + "(.*)", theirs)
    for pattern, own in _OWN.items():
        match = layer and re.fullmatch(pattern, layer[2])
        if match:
            return f"blk.{layer[1]}.{own.format(match[1])}"
    return None


def with_stacked_experts(tensors: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Return the tensors with those of a layer's experts as one for each projection."""
    found: dict[str, np.ndarray] = {}
    experts: dict[str, dict[int, np.ndarray]] = {}
    for name, tensor in tensors.items():
        one = re.fullmatch(r"model\.layers\.(\d+)\.\w+\.experts\.(\d+)\.(\w+)\.weight", name)
        fused = re.fullmatch(
            r"model\.layers\.(\d+)\.mlp\.experts\.(gate_up|down)_proj(_bias)?", name
        )
        if one:
            own = f"blk.{one[1]}.ffn_{_PROJECTIONS[one[3]]}_exps.weight"
            experts.setdefault(own, {})[int(one[2])] = tensor
        elif fused:  # of GPT-OSS: a row for each input feature; gate and up by turns
            rows = tensor if fused[3] else tensor.swapaxes(1, 2)
            kind = "bias" if fused[3] else "weight"
            parts = {"down": rows}
            if fused[2] == "gate_up":
                parts = {"gate": rows[:, 0::2], "up": rows[:, 1::2]}
            for part, values in parts.items():
                found[f"blk.{fused[1]}.ffn_{part}_exps.{kind}"] = np.ascontiguousarray(values)
        else:
            found[name] = tensor
    for own, matrices in experts.items():
        found[own] = np.stack([matrices[i] for i in range(len(matrices))])
    return found
