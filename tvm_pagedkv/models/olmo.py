# SPDX-License-Identifier: Apache-2.0
"""OLMo 2: norms after attention and the MLP instead of before, and of the whole of Q and of K."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from . import fields as read
from .config import DecoderConfig, Norms


def olmo2(fields: Mapping[str, Any]) -> DecoderConfig:
    """OLMo 2."""
    bias = read.flag(fields, "attention_bias")
    num_layers = read.positive(fields, "num_hidden_layers")
    return DecoderConfig(
        **read.shape({"rms_norm_eps": 1e-5, **fields}),
        layers=read.layers(fields, [read.FULL] * num_layers),
        norms=Norms(
            before_attention=None,
            after_attention="post_attention_layernorm",
            before_mlp=None,
            after_mlp="post_feedforward_layernorm",
        ),
        qk_norm="projection",
        qkv_bias=bias,
        o_bias=bias,
        activation=read.silu(fields),
        tied_embeddings=read.flag(fields, "tie_word_embeddings"),
        longest_text=read.longest_text(fields),
    )
