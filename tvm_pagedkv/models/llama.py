# SPDX-License-Identifier: Apache-2.0
"""Llama and Mistral: norms before attention and MLP, SwiGLU, no norms of Q and K."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from . import fields as read
from .config import DecoderConfig


def llama(fields: Mapping[str, Any]) -> DecoderConfig:
    """Read the fields of Llama 1 to 3 and of models with its architecture (TinyLlama, Yi, ...)."""
    if fields.get("sliding_window") is not None:
        window = read.positive(fields, "sliding_window")
        raise ValueError(
            f"sliding_window {window} is supported in MistralForCausalLM only, not in Llama"
        )
    return _decoder(fields, read.FULL)


def mistral(fields: Mapping[str, Any]) -> DecoderConfig:
    """Read the fields of Mistral 7B and Nemo. Version 0.1 has a window in every layer."""
    has_window = fields.get("sliding_window") is not None
    return _decoder(fields, read.SLIDING if has_window else read.FULL)


def _decoder(fields: Mapping[str, Any], kind: str) -> DecoderConfig:
    bias = read.flag(fields, "attention_bias")
    num_layers = read.positive(fields, "num_hidden_layers")
    return DecoderConfig(
        **read.shape(fields),
        layers=read.layers(fields, [kind] * num_layers),
        qkv_bias=bias,
        o_bias=bias,
        mlp_bias=read.flag(fields, "mlp_bias"),
        activation=read.silu(fields),
        tied_embeddings=read.flag(fields, "tie_word_embeddings"),
        longest_text=read.longest_text(fields),
    )
