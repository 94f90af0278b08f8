# SPDX-License-Identifier: Apache-2.0
"""Gemma 2 and the text models of Gemma 3.

Norms before and after attention and the MLP, all of which multiply by 1 + weight; embeddings scaled
by sqrt(hidden_size); GELU; a softmax scale of its own. Gemma 2 has soft-caps of the attention's and
of the final logits, and a window in every other layer. Gemma 3 has norms of each head of Q and K,
windows in five of six layers, and a rotation of its own for each of the two kinds of layers.
Activations of both exceed the range of float16.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from tvm_pagedkv.config import LayerSpec

from ..blocks.attention import Attention
from ..blocks.mlp import Mlp
from ..config import fields as read
from ..config.decoder_config import DecoderConfig
from ..config.layer import Norms
from ..gguf.family import NORMS_AFTER as GGUF_NORMS_AFTER
from ..gguf.family import GgufFamily, Header
from .family import Family
from .gguf_keys import layer_types
from .layers import decoder_layers
from .pictures import with_pictures

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


def _decoder(
    fields: Mapping[str, Any], specs: Sequence[LayerSpec], qk_norm: str | None = None
) -> DecoderConfig:
    if fields.get("use_bidirectional_attention"):
        raise ValueError("use_bidirectional_attention is unsupported")
    bias = read.flag(fields, "attention_bias")
    shape = read.shape(fields)
    scalar = read.positive_number(fields, "query_pre_attn_scalar", 256.0)
    scale = None if scalar is None else scalar**-0.5
    attention = Attention(*shape.heads, scale=scale, qkv_bias=bias, o_bias=bias, qk_norm=qk_norm)
    mlp = Mlp(shape.intermediate_size, gelu(fields))
    return DecoderConfig(
        **shape.model,
        layers=decoder_layers(attention, specs, mlp, norms=NORMS),
        norm_offset=1.0,
        attention_softcap=read.positive_number(fields, "attn_logit_softcapping", None),
        logit_softcap=read.positive_number(fields, "final_logit_softcapping", None),
        embedding_scale=shape.hidden_size**0.5,
        tied_embeddings=read.flag(fields, "tie_word_embeddings", True),
        longest_text=read.longest_text(fields),
        overflows_float16=True,
    )


def gelu(fields: Mapping[str, Any]) -> str:
    """Return the activation of the MLPs of Gemma."""
    known = {"gelu_pytorch_tanh": "gelu_tanh"}
    return read.activation(fields, "hidden_activation", known, "gelu_pytorch_tanh")


# --- GGUF ---------------------------------------------------------------------------------------

GGUF_TENSORS = GGUF_NORMS_AFTER | {"ffn_norm": "pre_feedforward_layernorm"}
_LAYERS_OF_27B = {"gemma2": 46, "gemma3": 62}


def _gguf_fields(header: Header) -> dict[str, Any]:
    """Return the window and the softmax scale, which only the models of 27 B have of their own."""
    fields, scale = header.fields, header.key("attention.scale", float, 0) or None
    scalar = fields["head_dim"] if scale is None else scale**-2
    is_27b = fields["num_hidden_layers"] == _LAYERS_OF_27B[header.metadata.architecture]
    if scale is None and is_27b:
        scalar = fields["hidden_size"] / fields["num_attention_heads"]
    return {
        "sliding_window": header.key("attention.sliding_window", int),
        "query_pre_attn_scalar": scalar,
    }


def _gguf_fields_of_2(header: Header) -> dict[str, Any]:
    return {
        **_gguf_fields(header),
        "attn_logit_softcapping": header.key("attn_logit_softcapping", float, 50.0),
        "final_logit_softcapping": header.key("final_logit_softcapping", float, 30.0),
    }


def _gguf_fields_of_3(header: Header) -> dict[str, Any]:
    return {
        **_gguf_fields(header),
        "rope_theta": header.key("rope.freq_base", float, 1e6),
        "rope_local_base_freq": header.key("rope.freq_base_swa", float, 10000.0),
        "final_logit_softcapping": header.key("final_logit_softcapping", float, 0) or None,
        **layer_types(header, 6),
    }


_GGUF2 = GgufFamily("gemma2", _gguf_fields_of_2, layer_tensors=GGUF_TENSORS, norm_offset=1.0)
_GGUF3 = GgufFamily("gemma3", _gguf_fields_of_3, layer_tensors=GGUF_TENSORS, norm_offset=1.0)

FAMILIES = (
    Family("Gemma2ForCausalLM", "gemma2", gemma2, _GGUF2),
    Family("Gemma3ForCausalLM", "gemma3_text", gemma3, _GGUF3),
    Family("Gemma3ForConditionalGeneration", "gemma3", with_pictures(gemma3_text=gemma3)),
)
