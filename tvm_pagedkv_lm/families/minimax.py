# SPDX-License-Identifier: Apache-2.0
"""MiniMax M2: experts in all layers, chosen by sigmoids and a correction, as in GLM-4.5.

Q and K have norms over all of their heads, and half of each head is rotated.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..blocks.attention import Attention
from ..blocks.mlp import Mlp
from ..config import fields as read
from ..config.decoder_config import DecoderConfig
from ..config.expert_config import ExpertNames, Experts, num_experts
from .family import Family
from .layers import decoder_layers, mlps

NAMES = ExpertNames(
    block="block_sparse_moe",
    correction="e_score_correction_bias",
    gate="w1",
    up="w3",
    down="w2",
)


def minimax_m2(fields: Mapping[str, Any]) -> DecoderConfig:
    """Read the fields of MiniMax M2, whose older files have ``rotary_dim``."""
    fields = with_partial_rotation(fields)
    num_layers = read.positive(fields, "num_hidden_layers")
    experts = Experts(
        num_experts(fields, 256),
        read.positive(fields, "num_experts_per_tok", 8),
        read.positive(fields, "intermediate_size", 1536),
        "sigmoid",
        has_correction=True,
        names=NAMES,
    )
    shape = read.shape(fields)
    attention = Attention(*shape.heads, qk_norm="projection")
    mlp = Mlp(shape.intermediate_size, read.silu(fields))
    specs = read.layers(fields, [read.FULL] * num_layers, partial=1.0)
    return DecoderConfig(
        **shape.model,
        layers=decoder_layers(attention, specs, mlps(mlp, experts, num_layers)),
        has_draft_layers=True,
        tied_embeddings=read.flag(fields, "tie_word_embeddings"),
        longest_text=read.longest_text(fields),
    )


def with_partial_rotation(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields with the defaults of these models; older files have ``rotary_dim``."""
    fields = {"head_dim": 128, "rope_theta": 5e6, **fields}
    if fields.get("rotary_dim") is not None:
        partial = read.positive(fields, "rotary_dim") / read.positive(fields, "head_dim")
        fields = {"partial_rotary_factor": partial, **fields}
    return fields


FAMILIES = (Family("MiniMaxM2ForCausalLM", "minimax_m2", minimax_m2),)
