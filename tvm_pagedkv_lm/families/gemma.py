# SPDX-License-Identifier: Apache-2.0
"""Gemma 2 and the text models of Gemma 3.

Norms before and after attention and the MLP, all of which multiply by 1 + weight; embeddings scaled
by sqrt(hidden_size); GELU; a softmax scale of its own. Gemma 2 has soft-caps of the attention's and
of the final logits, and a window in every other layer. Gemma 3 has norms of each head of Q and K,
windows in five of six layers, and a rotation of its own for each of the two kinds of layers.
Activations of both exceed the range of float16.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..config import fields as read
from ..config.decoder_config import DecoderConfig, Norms

NORMS = Norms(
    before_attention="input_layernorm",
    after_attention="post_attention_layernorm",
    before_mlp="pre_feedforward_layernorm",
    after_mlp="post_feedforward_layernorm",
)

_GEMMA3 = {
    "vocab_size": 262208,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "max_position_embeddings": 131072,
    "sliding_window": 4096,
}


def gemma2(fields: Mapping[str, Any]) -> DecoderConfig:
    """Gemma 2; its soft-caps are on unless the file says null."""
    soft_caps = {"attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0}
    fields = {**soft_caps, "head_dim": 256, "sliding_window": 4096, **fields}
    num_layers = read.positive(fields, "num_hidden_layers")
    default = [read.FULL if i % 2 else read.SLIDING for i in range(num_layers)]
    return _decoder(fields, read.layers(fields, read.layer_kinds(fields, default)))


def gemma3(fields: Mapping[str, Any]) -> DecoderConfig:
    """The text model of Gemma 3; published files leave out what is the default.

    Its attention has no soft-cap, though files have the field for one.
    """
    fields = {**_GEMMA3, **fields, "attn_logit_softcapping": None}
    num_layers = read.positive(fields, "num_hidden_layers")
    pattern = read.positive(fields, "sliding_window_pattern", 6)
    default = [read.SLIDING if (i + 1) % pattern else read.FULL for i in range(num_layers)]
    kinds = read.layer_kinds(fields, default)
    theta = read.positive_number(fields, "rope_theta", 1e6)
    local = read.positive_number(fields, "rope_local_base_freq", 1e4)
    layers = read.layers(read.with_rotations(fields, full=theta, sliding=local), kinds)
    return _decoder(fields, layers, qk_norm="head")


def _decoder(fields: Mapping[str, Any], layers, **own: Any) -> DecoderConfig:
    if fields.get("use_bidirectional_attention"):
        raise ValueError("use_bidirectional_attention is unsupported")
    bias = read.flag(fields, "attention_bias")
    shape = read.shape(fields)
    scalar = read.positive_number(fields, "query_pre_attn_scalar", 256.0)
    known = {"gelu_pytorch_tanh": "gelu_tanh"}
    return DecoderConfig(
        **shape,
        layers=layers,
        norms=NORMS,
        norm_offset=1.0,
        qkv_bias=bias,
        o_bias=bias,
        activation=read.activation(fields, "hidden_activation", known, "gelu_pytorch_tanh"),
        attention_scale=None if scalar is None else scalar**-0.5,
        attention_softcap=read.positive_number(fields, "attn_logit_softcapping", None),
        logit_softcap=read.positive_number(fields, "final_logit_softcapping", None),
        embedding_scale=shape["hidden_size"] ** 0.5,
        tied_embeddings=read.flag(fields, "tie_word_embeddings", True),
        longest_text=read.longest_text(fields),
        overflows_float16=True,
        **own,
    )
