# SPDX-License-Identifier: Apache-2.0
"""The dense Qwen3.5: three of four layers are gated delta nets, the others attention with a gate.

Norms multiply by 1 + weight, but for those of the gated delta nets; a quarter of a head is rotated.
Checkpoints with an encoder of pictures are read as text models.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..config import ConvConfig, LayerSpec, RecurrentConfig
from . import fields as read
from .config import DecoderConfig, TensorNames

_LINEAR = "linear_attention"


def qwen3_5(fields: Mapping[str, Any]) -> DecoderConfig:
    """Read the fields of the text model."""
    return _decoder(fields, "model")


def qwen3_5_with_pictures(fields: Mapping[str, Any]) -> DecoderConfig:
    """Read the fields of the text model out of those of a model with an encoder of pictures."""
    text = fields.get("text_config")
    if not isinstance(text, Mapping):
        raise ValueError(f"text_config must be an object, got {text!r}")
    tied = {"tie_word_embeddings": fields.get("tie_word_embeddings")}
    return _decoder({**tied, **text}, "model.language_model")


def _decoder(fields: Mapping[str, Any], prefix: str) -> DecoderConfig:
    fields = {"head_dim": 256, "partial_rotary_factor": 0.25, **fields}
    num_layers = read.positive(fields, "num_hidden_layers")
    interval = read.positive(fields, "full_attention_interval", 4)
    default = [_LINEAR if (i + 1) % interval else read.FULL for i in range(num_layers)]
    kinds = read.layer_kinds(fields, default, (read.FULL, _LINEAR))
    state = RecurrentConfig(
        "gated_delta",
        num_heads=read.positive(fields, "linear_num_value_heads", 32),
        num_key_heads=read.positive(fields, "linear_num_key_heads", 16),
        key_dim=read.positive(fields, "linear_key_head_dim", 128),
        value_dim=read.positive(fields, "linear_value_head_dim", 128),
    )
    channels = 2 * state.num_key_heads * state.key_dim + state.num_heads * state.value_dim
    conv = ConvConfig(channels, read.positive(fields, "linear_conv_kernel_dim", 4), "silu")
    recurrent = LayerSpec("recurrent", recurrent=state, conv=conv)
    bias = read.flag(fields, "attention_bias")
    return DecoderConfig(
        **read.shape(fields),
        layers=read.layers(fields, kinds, {_LINEAR: recurrent}),
        names=TensorNames(model=prefix, mixer="linear_attn"),
        norm_offset=1.0,
        qk_norm="head",
        attention_gate=True,
        qkv_bias=bias,
        o_bias=bias,
        activation=read.silu(fields),
        tied_embeddings=read.flag(fields, "tie_word_embeddings"),
        longest_text=read.longest_text(fields),
    )
