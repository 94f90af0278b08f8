# SPDX-License-Identifier: Apache-2.0
"""DeepSeek V2 and V3, and what has their architecture: Kimi K2, GLM-4.7-Flash, Mistral 4.

Multi-head latent attention, and experts beside shared ones behind the first layers. V2 chooses
experts by a softmax, from the groups with the best single ones; the others as GLM-4.5 does.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from ..blocks.latent import LatentAttention
from ..blocks.mlp import Mlp
from ..config import fields as read
from ..config.decoder_config import DecoderConfig
from ..config.expert_config import ExpertNames, Experts, first_dense_layers, num_experts
from ..config.latent_config import Latent
from ..config.layer import Layer
from ..gguf.family import GgufFamily, Header
from .family import Family
from .gguf_keys import SIGMOID, SOFTMAX, experts_in_groups
from .layers import mlps

V3_DEFAULTS = {"routed_scaling_factor": 2.5, "n_group": 8, "topk_group": 4}
_MISTRAL4_ROPE = {
    "rope_type": "yarn",
    "rope_theta": 1e4,
    "factor": 128.0,
    "original_max_position_embeddings": 8192,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "llama_4_scaling_beta": 0.1,
}


def deepseek_v2(fields: Mapping[str, Any]) -> DecoderConfig:
    """Read the fields of DeepSeek V2 and V2-Lite."""
    if read.flag(fields, "norm_topk_prob"):
        raise ValueError("norm_topk_prob is not supported in DeepSeek V2")
    method = fields.get("topk_method") or "greedy"
    if method not in ("greedy", "group_limited_greedy"):
        raise ValueError(f"topk_method must be greedy or group_limited_greedy, got {method!r}")
    groups = _groups(fields) if method == "group_limited_greedy" else {}
    experts = _experts(fields, "softmax", normalizes=False, ranked_by=1, **groups)
    return _decoder(fields, experts, first_dense_layers(fields, 0), True)


def deepseek_v3(fields: Mapping[str, Any]) -> DecoderConfig:
    """Read the fields of DeepSeek V3 and R1, and of Kimi K2."""
    return with_corrected_choice({**V3_DEFAULTS, **fields})


def with_corrected_choice(fields: Mapping[str, Any], **own: Any) -> DecoderConfig:
    """Read the fields of a model whose experts are chosen by sigmoids and a correction of them.

    `own` are further fields of its `Experts`.
    """
    normalizes = read.flag(fields, "norm_topk_prob", True)
    how = {"normalizes": normalizes, "has_correction": True, **_groups(fields)}
    experts = _experts(fields, "sigmoid", **how, **own)
    is_interleaved = read.flag(fields, "rope_interleave", True)
    return _decoder(fields, experts, first_dense_layers(fields, 3), is_interleaved)


def glm4_moe_lite(fields: Mapping[str, Any]) -> DecoderConfig:
    """Read the fields of GLM-4.7-Flash."""
    defaults = {"first_k_dense_replace": 1, "rms_norm_eps": 1e-5, "routed_scaling_factor": 1.8}
    return with_corrected_choice({**defaults, **with_dense_layers(fields)})


def mistral4(fields: Mapping[str, Any]) -> DecoderConfig:
    """Read the fields of the text models of Mistral 4, whose Q grows with the position."""
    if read.positive(fields, "n_group", 1) != 1:
        raise ValueError(f"n_group must be 1 in Mistral 4, got {fields['n_group']}")
    rope = read.rope_fields(fields) or dict(_MISTRAL4_ROPE)
    # The share of a head before absorption; of what is rotated it would be all.
    rope.pop("partial_rotary_factor", None)
    growth = read.query_growth(fields, rope)
    normalizes = read.flag(fields, "norm_topk_prob", True)
    names = ExpertNames(fused_gate_up="gate_up_proj", is_stacked=True)
    experts = _experts(fields, "softmax", normalizes=normalizes, names=names)
    dense = first_dense_layers(fields, 0)
    fields = {**fields, "rope_parameters": rope, "rope_scaling": None}
    return _decoder(fields, experts, dense, read.flag(fields, "rope_interleave", True), growth)


def with_dense_layers(fields: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the fields with the number of dense layers, which newer files list by layer."""
    kinds = fields.get("mlp_layer_types")
    if kinds is None:
        return fields
    num_dense = sum(kind == "dense" for kind in kinds)
    if kinds != ["dense"] * num_dense + ["sparse"] * (len(kinds) - num_dense):
        raise ValueError(f"mlp_layer_types must be dense, then sparse, got {kinds!r}")
    return {**fields, "first_k_dense_replace": num_dense}


def _experts(fields: Mapping[str, Any], scores: str, **how: Any) -> Experts:
    width = read.positive(fields, "moe_intermediate_size")
    return Experts(
        num_experts(fields, 64),
        read.positive(fields, "num_experts_per_tok"),
        width,
        scores,
        scale=read.positive_number(fields, "routed_scaling_factor", 1.0) or 1.0,
        shared_width=width * read.positive(fields, "n_shared_experts", 1),
        **how,
    )


def _groups(fields: Mapping[str, Any]) -> dict[str, int]:
    return {
        "num_groups": read.positive(fields, "n_group", 1),
        "num_chosen_groups": read.positive(fields, "topk_group", 1),
    }


def _decoder(
    fields: Mapping[str, Any],
    experts: Experts,
    dense_layers: Sequence[int],
    is_interleaved: bool,
    growth: tuple[float, int] | None = None,
) -> DecoderConfig:
    q_rank = fields.get("q_lora_rank")
    latent = Latent(
        read.positive(fields, "kv_lora_rank", 512),
        read.positive(fields, "qk_rope_head_dim", 64),
        read.positive(fields, "qk_nope_head_dim", 128),
        read.positive(fields, "v_head_dim", 128),
        None if q_rank is None else read.positive(fields, "q_lora_rank"),
        is_interleaved,
        growth,
    )
    num_layers = read.positive(fields, "num_hidden_layers")
    rope = read.rope({**fields, "head_dim": latent.rope_dim}, read.FULL)
    bias = read.flag(fields, "attention_bias")
    shape = read.shape({**fields, "head_dim": latent.qk_dim})
    scale = _attention_scale(rope.scaling_dict, latent)
    attention = LatentAttention(shape.num_heads, latent, latent.layer(rope), scale, bias, bias)
    mlp = Mlp(shape.intermediate_size, read.silu(fields), read.flag(fields, "mlp_bias"))
    of_layers = mlps(mlp, experts, num_layers, dense_layers)
    return DecoderConfig(
        **shape.model,
        layers=tuple(Layer(attention, mlp=each) for each in of_layers),
        has_draft_layers=True,
        tied_embeddings=read.flag(fields, "tie_word_embeddings"),
        longest_text=read.longest_text(fields),
    )


def _attention_scale(scaling: Mapping[str, Any], shape: Latent) -> float:
    """Return the factor on logits, which grows with the factor of YaRN where the file says so."""
    magnitude, factor = scaling.get("mscale_all_dim") or 0.0, scaling.get("factor") or 1.0
    grown = 0.1 * magnitude * math.log(factor) + 1.0 if factor > 1 else 1.0
    return shape.qk_dim**-0.5 * grown**2


# --- GGUF ---------------------------------------------------------------------------------------


def _gguf_fields(header: Header) -> dict[str, Any]:
    """Return the fields of DeepSeek V2, or of V3 where scores of experts are sigmoids.

    Keys describe the heads after absorption; in older files, those before it.
    """
    rope_dim = header.key("rope.dimension_count", int)
    rank = header.key("attention.kv_lora_rank", int)
    if "attention.key_length_mla" in header.metadata:
        key_length = header.key("attention.key_length_mla", int)
        v_dim = header.key("attention.value_length_mla", int)
    else:
        key_length = header.fields["head_dim"]
        v_dim = header.key("attention.value_length", int)
    own = {
        "num_key_value_heads": header.fields["num_attention_heads"],
        "partial_rotary_factor": 1.0,
        "kv_lora_rank": rank,
        "q_lora_rank": header.key("attention.q_lora_rank", int, 0) or None,
        "qk_rope_head_dim": rope_dim,
        "qk_nope_head_dim": key_length - rope_dim,
        "v_head_dim": v_dim,
    }
    magnitude = header.key("rope.scaling.yarn_log_multiplier", float, None)
    if magnitude is not None:
        # Of both of YaRN's magnitudes, which are equal in these models; float32 has seven digits.
        magnitude = round(magnitude / _GGUF_MAGNITUDE, 6)
        own["yarn"] = {"mscale": magnitude, "mscale_all_dim": magnitude}
    return own | _gguf_experts(header)


def _gguf_experts(header: Header) -> dict[str, Any]:
    """Return the fields of experts.

    Files of GLM-4.7-Flash leave out how experts are chosen. Only with sigmoids are scores corrected
    for the choice, so its tensors tell.
    """
    is_corrected = any(name.endswith(".exp_probs_b.bias") for name in header.shapes)
    default = SIGMOID if is_corrected else SOFTMAX
    is_v3 = (header.key("expert_gating_func", int, 0) or default) == SIGMOID
    if is_v3:
        return {"architectures": ["DeepseekV3ForCausalLM"], **experts_in_groups(header, SIGMOID)}
    own = experts_in_groups(header, SOFTMAX)
    own["topk_method"] = "group_limited_greedy" if own["n_group"] > 1 else "greedy"
    return own


_GGUF_MAGNITUDE = 0.1  # mscale_all_dim of YaRN is in the files by this factor
_GGUF = GgufFamily(
    "deepseek2",
    _gguf_fields,
    layer_tensors={
        "attn_q_a": "self_attn.q_a_proj",
        "attn_q_a_norm": "self_attn.q_a_layernorm",
        "attn_q_b": "self_attn.q_b_proj",
        "attn_kv_a_mqa": "self_attn.kv_a_proj_with_mqa",
        "attn_kv_a_norm": "self_attn.kv_a_layernorm",
        "attn_kv_b": "self_attn.kv_b_proj",
        "attn_k_b": "self_attn.kv_b_proj",  # with `attn_v_b`
    },
    v_width_differs=True,
)

FAMILIES = (
    Family("DeepseekV2ForCausalLM", "deepseek_v2", deepseek_v2, _GGUF),
    Family("DeepseekV3ForCausalLM", "deepseek_v3", deepseek_v3),
    Family("Glm4MoeLiteForCausalLM", "glm4_moe_lite", glm4_moe_lite),
    Family("Mistral4ForCausalLM", "mistral4", mistral4),
)
