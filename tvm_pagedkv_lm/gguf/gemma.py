# SPDX-License-Identifier: Apache-2.0
"""Gemma 3n and Gemma 4 in GGUF files: keys, and names of tensors."""

from __future__ import annotations

from statistics import NormalDist
from typing import Any

import numpy as np

from .metadata import Metadata

SLIDING, FULL = "sliding_attention", "full_attention"
_UNROTATED = 1e20  # what is above it, the files divide frequencies by that stand for none

MODEL_TENSORS = {
    "per_layer_token_embd": "model.embed_tokens_per_layer",
    "per_layer_model_proj": "model.per_layer_model_projection",
    "per_layer_proj_norm": "model.per_layer_projection_norm",
}
# Tensors with several matrices, which directories have one by one.
STACKED = {
    "altup_proj.weight": "model.altup_projections",
    "altup_unembd_proj.weight": "model.altup_unembed_projections",
}
_PER_LAYER = {
    "inp_gate": "per_layer_input_gate",
    "proj": "per_layer_projection",
    "post_norm": "post_per_layer_input_norm",
}
GEMMA3N_TENSORS = _PER_LAYER | {
    "altup_correct_coef": "altup.correction_coefs",
    "altup_predict_coef": "altup.prediction_coefs",
    "altup_router": "altup.modality_router",
    "altup_router_norm": "altup.router_norm",
    "laurel_l": "laurel.linear_left",
    "laurel_r": "laurel.linear_right",
    "laurel_post_norm": "laurel.post_laurel_norm",
}
GEMMA4_TENSORS = _PER_LAYER | {
    "pre_ffw_norm_2": "pre_feedforward_layernorm_2",
    "post_ffw_norm_1": "post_feedforward_layernorm_1",
    "post_ffw_norm_2": "post_feedforward_layernorm_2",
}
# Tensors of a layer whose names have another end in directories.
WHOLE_NAMES = {
    "gemma3n": {"altup_correct_scale.weight": "altup.correct_output_scale"},
    "gemma4": {
        "layer_output_scale.weight": "layer_scalar",
        "ffn_gate_inp.weight": "router.proj.weight",
        "ffn_gate_inp.scale": "router.scale",
        "ffn_gate_up_exps.weight": "experts.gate_up_proj",
        "ffn_down_exps.weight": "experts.down_proj",
        "ffn_down_exps.scale": "router.per_expert_scale",
    },
}


def gemma3n(metadata: Metadata, fields: dict[str, Any], shapes, read) -> dict[str, Any]:
    """Return the fields of Gemma 3n."""
    shares = metadata.of_model("activation_sparsity_scale", list)
    return {
        **_of_both(metadata, shapes),
        "intermediate_size": metadata.of_model("feed_forward_length", object),
        "rope_local_base_freq": metadata.of_model("rope.freq_base_swa", float, 1e4),
        "altup_active_idx": metadata.of_model("altup.active_idx", int),
        "altup_num_inputs": metadata.of_model("altup.num_inputs", int),
        "altup_correct_scale": "blk.0.altup_correct_scale.weight" in shapes,
        "laurel_rank": _extent(shapes, "blk.0.laurel_l.weight"),
        # The files have how many standard deviations above the mean a gate is cut off.
        "activation_sparsity_pattern": [round(NormalDist().cdf(x), 6) for x in shares],
    }


def gemma4(metadata: Metadata, fields: dict[str, Any], shapes, read) -> dict[str, Any]:
    """Return the fields of Gemma 4."""
    of_model = metadata.of_model
    own = _of_both(metadata, shapes)
    kinds, num_shared = own["layer_types"], own["num_kv_shared_layers"]
    head_dim = of_model("attention.key_length_swa", int)
    for key in ("attention.value_length_swa", "rope.dimension_count_swa"):
        if of_model(key, int, head_dim) != head_dim:
            raise ValueError(f"gemma4.{key} must be {head_dim}")
    keeps_kv = range(len(kinds) - num_shared)
    full = [i for i in keeps_kv if kinds[i] == FULL]
    without_v = [i for i in full if f"blk.{i}.attn_v.weight" not in shapes]
    if without_v not in ([], full):
        raise ValueError(f"the file lacks the tensor blk.{without_v[0]}.attn_v.weight")
    heads, widths = (
        of_model(key, object) for key in ("attention.head_count_kv", "feed_forward_length")
    )
    heads = heads if isinstance(heads, list) else [heads] * len(kinds)
    widths = widths if isinstance(widths, list) else [widths] * len(kinds)
    if len(heads) != len(kinds) or len(widths) != len(kinds):
        raise ValueError("gemma4 needs head_count_kv and feed_forward_length for each layer")
    of_kind = {kind: heads[i] for i, kind in reversed(list(enumerate(kinds)))}
    own |= {
        "head_dim": head_dim,
        "global_head_dim": fields["head_dim"],
        "num_key_value_heads": of_kind.get(SLIDING, heads[0]),
        "attention_k_eq_v": bool(without_v),
        "intermediate_size": widths[0],
        "use_double_wide_mlp": widths[-1] == 2 * widths[0],
        "rope_parameters": {
            SLIDING: {"rope_type": "default", "rope_theta": of_model("rope.freq_base_swa", float)},
            FULL: {
                "rope_type": "proportional",
                "rope_theta": fields["rope_theta"],
                "partial_rotary_factor": _rotated_share(read("rope_freqs.weight")),
            },
        },
    }
    if without_v:
        own["num_global_key_value_heads"] = of_kind[FULL]
    if of_model("expert_count", int, 0):
        own |= {
            "enable_moe_block": True,
            "num_experts": of_model("expert_count", int),
            "top_k_experts": of_model("expert_used_count", int),
            "moe_intermediate_size": of_model("expert_feed_forward_length", int),
            "num_experts_per_tok": of_model("expert_used_count", int),
        }
    return own


def _of_both(metadata: Metadata, shapes) -> dict[str, Any]:
    has_window = metadata.of_model("attention.sliding_window_pattern", list)
    width = metadata.of_model("embedding_length_per_layer_input", int)
    own = {
        "sliding_window": metadata.of_model("attention.sliding_window", int),
        "layer_types": [SLIDING if each else FULL for each in has_window],
        "num_kv_shared_layers": metadata.of_model("attention.shared_kv_layers", int),
        "hidden_size_per_layer_input": width,
        "final_logit_softcapping": metadata.of_model("final_logit_softcapping", float, 0) or None,
    }
    if width:
        own["vocab_size_per_layer_input"] = _extent(shapes, "per_layer_token_embd.weight")
    return own


def _extent(shapes, name: str) -> int:
    if name not in shapes:
        raise ValueError(f"the file lacks the tensor {name}")
    return shapes[name][0]


def _rotated_share(factors: np.ndarray) -> float:
    """Return the share of a head that is rotated, of factors that are 1 for it, then huge."""
    count = int((factors == 1).sum())
    if not (factors[:count] == 1).all() or not (factors[count:] > _UNROTATED).all():
        raise ValueError("the factors in tensor rope_freqs.weight are not those of Gemma 4")
    return count / len(factors)
