# SPDX-License-Identifier: Apache-2.0
"""Qwen2, Qwen2.5 and Qwen3.

As Llama; Qwen2 has biases on Q, K and V, and Qwen3 norms of each head of Q and K instead. The last
layers may have a window. Qwen3-MoE has experts in place of MLPs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from ..blocks.attention import Attention
from ..blocks.mlp import Mlp
from ..config import fields as read
from ..config.decoder_config import DecoderConfig
from ..config.expert_config import Experts, dense_layers, num_experts
from ..gguf.family import GgufFamily, Header
from .family import Family
from .gguf_keys import SOFTMAX, expert_counts
from .layers import decoder_layers, mlps

_HIDDEN_SIZE_OF_72B = 8192


def qwen2(fields: Mapping[str, Any]) -> DecoderConfig:
    """Read the fields of Qwen2, Qwen2.5 and QwQ.

    In the models of 72 B, hidden states of a few channels exceed the range of float16.
    """
    config = _decoder(fields, qkv_bias=True)
    return replace(config, overflows_float16=config.hidden_size >= _HIDDEN_SIZE_OF_72B)


def qwen3(fields: Mapping[str, Any]) -> DecoderConfig:
    """Read the fields of the dense Qwen3."""
    return _qwen3({"head_dim": 128, **fields})


def qwen3_moe(fields: Mapping[str, Any]) -> DecoderConfig:
    """Read the fields of Qwen3-MoE, in which all layers have a window or none."""
    num_layers = read.positive(fields, "num_hidden_layers")
    experts = Experts(
        num_experts(fields, 128),
        read.positive(fields, "num_experts_per_tok", 8),
        read.positive(fields, "moe_intermediate_size", 768),
        normalizes=read.flag(fields, "norm_topk_prob"),
    )
    dense = dense_layers(fields, num_layers)
    fields = {"intermediate_size": 6144, **fields, "max_window_layers": 0, "layer_types": None}
    return _qwen3(fields, experts, dense)


def _qwen3(
    fields: Mapping[str, Any], experts: Experts | None = None, dense: Sequence[int] = ()
) -> DecoderConfig:
    bias = read.flag(fields, "attention_bias")
    return _decoder(fields, experts, dense, qkv_bias=bias, o_bias=bias, qk_norm="head")


def _decoder(
    fields: Mapping[str, Any],
    experts: Experts | None = None,
    dense: Sequence[int] = (),
    **of_attention: Any,
) -> DecoderConfig:
    shape, kinds = read.shape(fields), _kinds(fields)
    attention = Attention(*shape.heads, **of_attention)
    mlp = Mlp(shape.intermediate_size, read.silu(fields))
    of_layers = mlp if experts is None else mlps(mlp, experts, len(kinds), dense)
    return DecoderConfig(
        **shape.model,
        layers=decoder_layers(attention, read.layers(fields, kinds), of_layers),
        tied_embeddings=read.flag(fields, "tie_word_embeddings"),
        longest_text=read.longest_text(fields),
    )


def _kinds(fields: Mapping[str, Any]) -> list[str]:
    """Return the layers. Files may name a window that ``use_sliding_window`` disables."""
    num_layers = read.positive(fields, "num_hidden_layers")
    if not read.flag(fields, "use_sliding_window") or fields.get("sliding_window") is None:
        return [read.FULL] * num_layers
    first = fields.get("max_window_layers", 28)
    if isinstance(first, bool) or not isinstance(first, int) or first < 0:
        raise ValueError(f"max_window_layers must be an integer from 0 on, got {first!r}")
    default = [read.SLIDING if i >= first else read.FULL for i in range(num_layers)]
    return read.layer_kinds(fields, default)


def _gguf_fields(header: Header) -> dict[str, Any]:
    """Return the fields of Qwen3 with experts, whose files leave out that scores are divided."""
    return {
        **expert_counts(header, "num_experts", SOFTMAX),
        "moe_intermediate_size": header.key("expert_feed_forward_length", int),
        "norm_topk_prob": header.key("expert_weights_norm", bool, True),
    }


FAMILIES = (
    Family("Qwen2ForCausalLM", "qwen2", qwen2, GgufFamily("qwen2")),
    Family("Qwen3ForCausalLM", "qwen3", qwen3, GgufFamily("qwen3")),
    Family("Qwen3MoeForCausalLM", "qwen3_moe", qwen3_moe, GgufFamily("qwen3moe", _gguf_fields)),
)
