# SPDX-License-Identifier: Apache-2.0
"""Keys of GGUF files that several families share: windows, and how experts are chosen."""

from __future__ import annotations

from typing import Any

from ..config.fields import FULL, SLIDING
from ..gguf.family import Header

SOFTMAX, SIGMOID, SOFTMAX_OF_CHOSEN = 1, 2, 3  # of `expert_gating_func`


def layer_types(header: Header, default: int) -> dict[str, Any]:
    """Return which layers have a window: a flag for each, or all but each nth."""
    key = "attention.sliding_window_pattern"
    if isinstance(header.key(key, object, default), list):
        return {"layer_types": [SLIDING if each else FULL for each in header.key(key, list)]}
    return {"sliding_window_pattern": header.key(key, int, default)}


def expert_counts(header: Header, name: str, gating: int) -> dict[str, Any]:
    """Return the experts of a layer and of a token, after a check of how they are chosen."""
    found = header.key("expert_gating_func", int, 0)
    if found not in (0, gating):  # 0: as the architecture has it
        key = f"{header.metadata.architecture}.expert_gating_func"
        raise ValueError(f"{key} must be {gating}, got {found}")
    return {
        name: header.key("expert_count", int),
        "num_experts_per_tok": header.key("expert_used_count", int),
    }


def experts_in_groups(header: Header, gating: int) -> dict[str, Any]:
    """Return the fields of experts in groups, some of which may be chosen among."""
    return {
        **expert_counts(header, "n_routed_experts", gating),
        "moe_intermediate_size": header.key("expert_feed_forward_length", int),
        "n_shared_experts": header.key("expert_shared_count", int),
        "n_group": header.key("expert_group_count", int, 0) or 1,
        "topk_group": header.key("expert_group_used_count", int, 0) or 1,
        "first_k_dense_replace": header.key("leading_dense_block_count", int, 0),
        "routed_scaling_factor": header.key("expert_weights_scale", float, 0) or 1.0,
        "norm_topk_prob": header.key("expert_weights_norm", bool, False),
    }
