# SPDX-License-Identifier: Apache-2.0
"""Latent attention (MLA) in GGUF files: DeepSeek V2 and V3, Kimi K2, GLM-4.7-Flash.

Keys describe the heads after absorption, and the projection of K and V is in two tensors: that of K
with a row for each latent feature.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from . import experts
from .metadata import Metadata

TENSORS = {
    "attn_q_a": "self_attn.q_a_proj",
    "attn_q_a_norm": "self_attn.q_a_layernorm",
    "attn_q_b": "self_attn.q_b_proj",
    "attn_kv_a_mqa": "self_attn.kv_a_proj_with_mqa",
    "attn_kv_a_norm": "self_attn.kv_a_layernorm",
    "attn_kv_b": "self_attn.kv_b_proj",
    "attn_k_b": "self_attn.kv_b_proj",  # with `attn_v_b`
}
# mscale_all_dim of YaRN is in the files by this factor.
_MAGNITUDE = 0.1


def deepseek2(metadata: Metadata, fields: dict[str, Any], shapes, read) -> dict[str, Any]:
    """Return the fields of DeepSeek V2, or of V3 where scores of experts are sigmoids."""
    rope_dim = metadata.of_model("rope.dimension_count", int)
    rank = metadata.of_model("attention.kv_lora_rank", int)
    if "attention.key_length_mla" in metadata:
        key_length = metadata.of_model("attention.key_length_mla", int)
        v_dim = metadata.of_model("attention.value_length_mla", int)
    else:  # older files have the heads before absorption
        key_length, v_dim = fields["head_dim"], metadata.of_model("attention.value_length", int)
    own = {
        "num_key_value_heads": fields["num_attention_heads"],
        "partial_rotary_factor": 1.0,
        "kv_lora_rank": rank,
        "q_lora_rank": metadata.of_model("attention.q_lora_rank", int, 0) or None,
        "qk_rope_head_dim": rope_dim,
        "qk_nope_head_dim": key_length - rope_dim,
        "v_head_dim": v_dim,
    }
    magnitude = metadata.of_model("rope.scaling.yarn_log_multiplier", float, None)
    if magnitude is not None:
        # Of both of YaRN's magnitudes, which are equal in these models; float32 has seven digits.
        own["yarn_magnitude"] = round(magnitude / _MAGNITUDE, 6)
    return own | experts.deepseek2(metadata, shapes)


def joined(k: np.ndarray, v: np.ndarray) -> np.ndarray:
    """Return the projection ``[heads * (nope + v), rank]`` of both.

    Parameters
    ----------
    k : array ``[heads, rank, nope]``
    v : array ``[heads, v, rank]``
    """
    both = np.concatenate([k.swapaxes(1, 2), v], axis=1)
    return both.reshape(-1, both.shape[-1])
