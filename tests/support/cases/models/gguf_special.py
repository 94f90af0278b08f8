# SPDX-License-Identifier: Apache-2.0
"""Latent attention, Gemma 3n and Gemma 4 in GGUF files: keys, and tensors as llama.cpp has them."""

from __future__ import annotations

import re
from statistics import NormalDist
from typing import Any

import numpy as np

Tensors = dict[str, np.ndarray]
LATENT = ("deepseek_v2", "deepseek_v3")
GEMMA = ("gemma3n_text", "gemma4_text")


def special_keys(fields: dict[str, Any]) -> dict[str, Any]:
    """Return the keys of a model that only these families have, or have in another way."""
    if fields["model_type"] in LATENT:
        return _latent_keys(fields)
    return _gemma_keys(fields) if fields["model_type"] in GEMMA else {}


def special_tensors(fields: dict[str, Any], tensors: Tensors) -> Tensors:
    """Return the tensors of a directory with those joined, split and named as in a file."""
    if fields["model_type"] in LATENT:
        return _with_split_projections(fields, tensors)
    return _gemma_tensors(tensors) if fields["model_type"] in GEMMA else tensors


def _latent_keys(fields: dict[str, Any]) -> dict[str, Any]:
    rank, rope_dim = fields["kv_lora_rank"], fields["qk_rope_head_dim"]
    is_v3 = fields["model_type"] == "deepseek_v3"
    rope = fields["rope_parameters"]
    found = {
        ".attention.head_count_kv": 1,
        ".attention.key_length": rank + rope_dim,
        ".attention.value_length": rank,
        ".attention.key_length_mla": fields["qk_nope_head_dim"] + rope_dim,
        ".attention.value_length_mla": fields["v_head_dim"],
        ".attention.kv_lora_rank": rank,
        ".attention.q_lora_rank": fields["q_lora_rank"],
        ".rope.dimension_count": rope_dim,
        ".leading_dense_block_count": fields.get("first_k_dense_replace", 0),
        ".expert_count": fields["n_routed_experts"],
        ".expert_used_count": fields["num_experts_per_tok"],
        ".expert_shared_count": fields["n_shared_experts"],
        ".expert_feed_forward_length": fields["moe_intermediate_size"],
        ".expert_weights_scale": fields["routed_scaling_factor"],
        ".expert_weights_norm": fields["norm_topk_prob"],
        ".expert_gating_func": 2 if is_v3 else 1,
        ".expert_group_count": fields["n_group"],
        ".expert_group_used_count": fields["topk_group"],
    }
    if rope["rope_type"] == "yarn":
        found |= {
            ".rope.scaling.type": "yarn",
            ".rope.scaling.factor": rope["factor"],
            ".rope.scaling.original_context_length": rope["original_max_position_embeddings"],
            ".rope.scaling.yarn_log_multiplier": 0.1 * rope["mscale_all_dim"],
            ".rope.scaling.yarn_beta_fast": float(rope.get("beta_fast") or 32),
            ".rope.scaling.yarn_beta_slow": float(rope.get("beta_slow") or 1),
        }
    return {key: value for key, value in found.items() if value is not None}


def _with_split_projections(fields: dict[str, Any], tensors: Tensors) -> Tensors:
    found, nope = {}, fields["qk_nope_head_dim"]
    for name, tensor in tensors.items():
        layer = re.fullmatch(r"model\.layers\.(\d+)\.self_attn\.kv_b_proj\.weight", name)
        if layer is None:
            found[name] = tensor
            continue
        heads = tensor.reshape(fields["num_attention_heads"], -1, tensor.shape[-1])
        k = np.ascontiguousarray(heads[:, :nope].swapaxes(1, 2))
        found[f"blk.{layer[1]}.attn_k_b.weight"] = k
        found[f"blk.{layer[1]}.attn_v_b.weight"] = np.ascontiguousarray(heads[:, nope:])
    return found


def _gemma_keys(fields: dict[str, Any]) -> dict[str, Any]:
    has_window = [kind == "sliding_attention" for kind in fields["layer_types"]]
    found = {
        ".attention.sliding_window": fields["sliding_window"],
        ".attention.sliding_window_pattern": has_window,
        ".attention.shared_kv_layers": fields["num_kv_shared_layers"],
        ".embedding_length_per_layer_input": fields["hidden_size_per_layer_input"],
    }
    if fields["model_type"] == "gemma3n_text":
        shares = fields["activation_sparsity_pattern"]
        local = fields["rope_parameters"]["sliding_attention"]["rope_theta"]
        return found | {
            ".altup.active_idx": fields["altup_active_idx"],
            ".altup.num_inputs": fields["altup_num_inputs"],
            ".activation_sparsity_scale": [
                NormalDist().inv_cdf(x) if x else float("-inf") for x in shares
            ],
            ".rope.freq_base_swa": local,
        }
    rope, width = fields["rope_parameters"], fields["head_dim"]
    num_layers, num_shared = fields["num_hidden_layers"], fields["num_kv_shared_layers"]
    kv_heads = _of_full_layers(fields).get("num_key_value_heads")
    mlp = fields["intermediate_size"]
    wide = 2 * mlp if fields.get("use_double_wide_mlp") else mlp
    found |= {
        ".attention.key_length": _of_full_layers(fields)["head_dim"],
        ".attention.value_length": _of_full_layers(fields)["head_dim"],
        ".attention.key_length_swa": width,
        ".attention.value_length_swa": width,
        ".rope.dimension_count": _of_full_layers(fields)["head_dim"],
        ".rope.dimension_count_swa": width,
        ".rope.freq_base": rope["full_attention"]["rope_theta"],
        ".rope.freq_base_swa": rope["sliding_attention"]["rope_theta"],
        ".feed_forward_length": [mlp] * (num_layers - num_shared) + [wide] * num_shared,
    }
    if kv_heads is not None:
        own = fields["num_key_value_heads"]
        found[".attention.head_count_kv"] = [own if each else kv_heads for each in has_window]
    if fields.get("enable_moe_block"):
        found |= {
            ".expert_count": fields["num_experts"],
            ".expert_used_count": fields["top_k_experts"],
            ".expert_feed_forward_length": fields["moe_intermediate_size"],
        }
    return found


def _of_full_layers(fields: dict[str, Any]) -> dict[str, int]:
    """Return what layers without a window have in another way."""
    return next(iter(fields["per_layer_config"].values()))


def rope_factors(fields: dict[str, Any]) -> np.ndarray:
    """Return the tensor rope_freqs.weight of Gemma 4, which leaves features unrotated."""
    half = _of_full_layers(fields)["head_dim"] // 2
    share = fields["rope_parameters"]["full_attention"]["partial_rotary_factor"]
    return np.float32([1.0] * int(half * share) + [1e30] * (half - int(half * share)))


def _gemma_tensors(tensors: Tensors) -> Tensors:
    found: Tensors = {}
    stacked: dict[str, dict[int, np.ndarray]] = {}
    for name, tensor in tensors.items():
        part = re.fullmatch(r"model\.(altup_(?:unembed_)?projections)\.(\d+)\.weight", name)
        layer = re.fullmatch(r"model\.layers\.(\d+)\.(.*)", name)
        if part:
            own = {"altup_projections": "altup_proj"}.get(part[1], "altup_unembd_proj")
            stacked.setdefault(f"{own}.weight", {})[int(part[2])] = tensor
        elif layer and layer[2] in _OF_LAYERS:
            found[f"blk.{layer[1]}.{_OF_LAYERS[layer[2]]}"] = tensor
        else:
            found[name] = tensor
    for own, matrices in stacked.items():
        found[own] = np.stack([matrices[i] for i in range(len(matrices))])
    return found


_OF_LAYERS = {
    "layer_scalar": "layer_output_scale.weight",
    "altup.correct_output_scale": "altup_correct_scale.weight",
    "router.proj.weight": "ffn_gate_inp.weight",
    "router.scale": "ffn_gate_inp.scale",
    "router.per_expert_scale": "ffn_down_exps.scale",
    "experts.gate_up_proj": "ffn_gate_up_exps.weight",
    "experts.down_proj": "ffn_down_exps.weight",
}
