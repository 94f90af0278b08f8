# SPDX-License-Identifier: Apache-2.0
"""Phi-3, Phi-3.5 and Phi-4 (mini).

As Llama, with the weights of Q, K and V in one tensor, those of gate and up in another, and
longrope: factors of the rotation for short texts, and others for those beyond the original length.
Phi-4-mini rotates three quarters of a head.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..blocks.attention import Attention, AttentionNames
from ..blocks.mlp import Mlp, MlpNames
from ..config import fields as read
from ..config.decoder_config import DecoderConfig
from ..gguf.family import GgufFamily, Header
from .family import Family
from .layers import decoder_layers


def phi3(fields: Mapping[str, Any]) -> DecoderConfig:
    """Phi-3 and what has its architecture."""
    kind = read.FULL if fields.get("sliding_window") is None else read.SLIDING
    defaults = {"rms_norm_eps": 1e-5, "original_max_position_embeddings": 4096}
    fields = {**defaults, **fields, "rope_scaling": _scaling(fields)}
    num_layers = read.positive(fields, "num_hidden_layers")
    shape = read.shape(fields)
    attention = Attention(*shape.heads, names=AttentionNames(fused_qkv="qkv_proj"))
    names = MlpNames(fused_gate_up="gate_up_proj")
    mlp = Mlp(shape.intermediate_size, read.silu(fields), names=names)
    specs = read.layers(fields, [kind] * num_layers, partial=1.0)
    return DecoderConfig(
        **shape.model,
        layers=decoder_layers(attention, specs, mlp),
        tied_embeddings=read.flag(fields, "tie_word_embeddings"),
        longest_text=read.longest_text(fields),
    )


def _scaling(fields: Mapping[str, Any]) -> dict[str, Any]:
    """``rope_scaling``, which the first files with longrope say is "yarn"."""
    scaling = read.rope_fields(fields)
    is_yarn = read.rope_type_of(scaling) == "yarn"
    return scaling | ({"rope_type": "longrope"} if is_yarn else {})


def _gguf_fields(header: Header) -> dict[str, Any]:
    return {"sliding_window": header.key("attention.sliding_window", int, 0) or None}


_GGUF = GgufFamily(
    "phi3",
    _gguf_fields,
    layer_tensors={"attn_qkv": "self_attn.qkv_proj", "ffn_up": "mlp.gate_up_proj"},
)

FAMILIES = (Family("Phi3ForCausalLM", "phi3", phi3, _GGUF),)
