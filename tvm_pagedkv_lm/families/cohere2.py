# SPDX-License-Identifier: Apache-2.0
"""Cohere2 (Command R7B, Command A): attention and the MLP side by side behind one layer norm.

Three layers of four have a window and a rotation of adjacent features, the others have neither.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..blocks.attention import Attention
from ..blocks.mlp import Mlp
from ..config import fields as read
from ..config.decoder_config import DecoderConfig
from ..config.layer import Norms
from ..gguf.family import GgufFamily, Header
from .family import Family
from .gguf_keys import layer_types
from .layers import decoder_layers


def cohere2(fields: Mapping[str, Any]) -> DecoderConfig:
    """Read the fields of Cohere2."""
    epsilon = read.positive_number(fields, "layer_norm_eps", 1e-5)
    bias = read.flag(fields, "attention_bias")
    pattern = read.positive(fields, "sliding_window_pattern", 4)
    num_layers = read.positive(fields, "num_hidden_layers")
    default = [read.SLIDING if (i + 1) % pattern else read.FULL for i in range(num_layers)]
    kinds = read.layer_kinds(fields, default)
    specs = read.layers({"sliding_window": 4096, **fields}, kinds)
    specs = read.with_rope_where(specs, [kind == read.SLIDING for kind in kinds])
    shape = read.shape({**fields, "rms_norm_eps": epsilon})
    attention = Attention(*shape.heads, interleaved_rope=True, qkv_bias=bias, o_bias=bias)
    mlp, norms = Mlp(shape.intermediate_size, read.silu(fields)), Norms(before_mlp=None)
    return DecoderConfig(
        **shape.model,
        layers=decoder_layers(attention, specs, mlp, norms=norms, parallel_mlp=True),
        norm_subtracts_mean=True,
        logit_scale=read.positive_number(fields, "logit_scale", 0.0625) or 1.0,
        tied_embeddings=read.flag(fields, "tie_word_embeddings", True),
        longest_text=read.longest_text(fields),
    )


def _gguf_fields(header: Header) -> dict[str, Any]:
    return {
        "layer_norm_eps": header.fields["rms_norm_eps"],
        "logit_scale": header.key("logit_scale", float),
        "sliding_window": header.key("attention.sliding_window", int),
        **layer_types(header, 4),
    }


_GGUF = GgufFamily("cohere2", _gguf_fields, norm="layer_norm")

FAMILIES = (Family("Cohere2ForCausalLM", "cohere2", cohere2, _GGUF),)
