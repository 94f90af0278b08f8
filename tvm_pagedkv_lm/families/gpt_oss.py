# SPDX-License-Identifier: Apache-2.0
"""GPT-OSS: experts with biases and a clamped gate, and attention with learned sinks.

Every second layer has a window. The weights of experts are mxfp4 in the makers' checkpoints, and
numbers with a row for each input feature in others.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..blocks.attention import Attention
from ..blocks.mlp import Mlp
from ..config import fields as read
from ..config.decoder_config import DecoderConfig
from ..config.expert_config import ExpertNames, Experts, num_experts
from ..gguf.family import GgufFamily, Header
from .family import Family
from .gguf_keys import SOFTMAX_OF_CHOSEN, expert_counts
from .layers import decoder_layers, mlps

_GATE_FACTOR, _GATE_LIMIT = 1.702, 7.0
_YARN = {
    "rope_type": "yarn",
    "factor": 32.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 4096,
}


def gpt_oss(fields: Mapping[str, Any]) -> DecoderConfig:
    """Read the fields of GPT-OSS."""
    defaults = {"head_dim": 64, "sliding_window": 128, "rope_theta": 150000.0, "rms_norm_eps": 1e-5}
    fields = {**defaults, **fields}
    if not fields.get("rope_parameters") and not fields.get("rope_scaling"):
        fields["rope_scaling"] = _YARN
    num_layers = read.positive(fields, "num_hidden_layers")
    default = [read.FULL if i % 2 else read.SLIDING for i in range(num_layers)]
    bias = read.flag(fields, "attention_bias", True)
    experts = Experts(
        num_experts(fields, 128),
        read.positive(fields, "num_experts_per_tok", 4),
        read.positive(fields, "intermediate_size"),
        router_bias=True,
        bias=True,
        names=ExpertNames(
            router="router",
            fused_gate_up="gate_up_proj",
            alternates=True,
            is_stacked=True,
            is_transposed=not fields.get("quantization_config"),
        ),
    )
    shape = read.shape(fields)
    attention = Attention(*shape.heads, has_sinks=True, qkv_bias=bias, o_bias=bias)
    mlp = Mlp(shape.intermediate_size, read.silu(fields), clamped_gate=clamped_gate(fields))
    specs = read.layers(fields, read.layer_kinds(fields, default))
    return DecoderConfig(
        **shape.model,
        layers=decoder_layers(attention, specs, mlps(mlp, experts, num_layers)),
        tied_embeddings=read.flag(fields, "tie_word_embeddings"),
        longest_text=read.longest_text(fields),
    )


def clamped_gate(fields: Mapping[str, Any]) -> tuple[float, float]:
    """Return the factor and the limit of the gate of experts."""
    factor = read.positive_number(fields, "swiglu_alpha", _GATE_FACTOR) or _GATE_FACTOR
    limit = read.positive_number(fields, "swiglu_limit", _GATE_LIMIT) or _GATE_LIMIT
    return factor, limit


def _gguf_fields(header: Header) -> dict[str, Any]:
    width = header.key("expert_feed_forward_length", int)
    return {
        "attention_bias": "blk.0.attn_q.bias" in header.shapes,
        "sliding_window": header.key("attention.sliding_window", int),
        **expert_counts(header, "num_local_experts", SOFTMAX_OF_CHOSEN),
        "intermediate_size": width,
        "yarn": {"truncate": False},  # the makers' configuration, which files leave out
    }


_GGUF = GgufFamily(
    "gpt-oss",
    _gguf_fields,
    layer_tensors={"post_attention_norm": "post_attention_layernorm"},
    whole_names={"attn_sinks.weight": "self_attn.sinks"},
)

FAMILIES = (Family("GptOssForCausalLM", "gpt_oss", gpt_oss, _GGUF, quantization="mxfp4"),)
