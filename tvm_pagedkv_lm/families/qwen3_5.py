# SPDX-License-Identifier: Apache-2.0
"""Qwen3-Next and Qwen3.5: three of four layers are gated delta nets, the others gated attention.

Norms multiply by 1 + weight, but for those of the gated delta nets; a quarter of a head is rotated.
Qwen3-Next and some Qwen3.5 have experts, and an expert with a gate that every token takes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from tvm_pagedkv.config import ConvConfig, LayerSpec, RecurrentConfig

from ..blocks.attention import Attention
from ..blocks.gated_delta_net import GatedDeltaNet
from ..blocks.mlp import Mlp
from ..config import fields as read
from ..config.decoder_config import DecoderConfig
from ..config.expert_config import ExpertNames, Experts, dense_layers, num_experts
from .family import Family
from .layers import decoder_layers, mlps
from .pictures import with_pictures

_LINEAR = "linear_attention"


def qwen3_5(fields: Mapping[str, Any]) -> DecoderConfig:
    """Read the fields of the dense text model."""
    return _decoder(fields)


def qwen3_5_moe(fields: Mapping[str, Any]) -> DecoderConfig:
    """Read the fields of the text model with experts in all layers."""
    fields = {"num_experts": 256, "num_experts_per_tok": 8, **fields}
    return _decoder(*_with_experts(fields))


def qwen3_next(fields: Mapping[str, Any]) -> DecoderConfig:
    """Read the fields of Qwen3-Next, whose gated delta nets have two projections in all."""
    fields = {"intermediate_size": 5632, **fields}
    dense = dense_layers(fields, read.positive(fields, "num_hidden_layers"))
    fields, experts = _with_experts(fields, read.flag(fields, "norm_topk_prob", True))
    return _decoder(fields, experts, dense, fused=("in_proj_qkvz", "in_proj_ba"))


def _with_experts(
    fields: Mapping[str, Any], normalizes: bool = True
) -> tuple[Mapping[str, Any], Experts]:
    """Return the experts, and the fields with the width of a dense MLP."""
    width = read.positive(fields, "moe_intermediate_size", 512)
    experts = Experts(
        num_experts(fields, 512),
        read.positive(fields, "num_experts_per_tok", 10),
        width,
        shared_width=read.positive(fields, "shared_expert_intermediate_size", 512),
        normalizes=normalizes,
        shared_gate=True,
        names=ExpertNames(shared="shared_expert"),
    )
    return {"intermediate_size": width, **fields}, experts


def _decoder(
    fields: Mapping[str, Any],
    experts: Experts | None = None,
    dense: Sequence[int] = (),
    fused: tuple[str, str] | None = None,
) -> DecoderConfig:
    fields = {"head_dim": 256, **fields}
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
    shape = read.shape(fields)
    attention = Attention(*shape.heads, qk_norm="head", has_gate=True, qkv_bias=bias, o_bias=bias)
    mixer = GatedDeltaNet(recurrent, "linear_attn", fused=fused)
    mlp = Mlp(shape.intermediate_size, read.silu(fields))
    of_layers = mlp if experts is None else mlps(mlp, experts, num_layers, dense)
    specs = read.layers(fields, kinds, {_LINEAR: recurrent}, partial=0.25)
    return DecoderConfig(
        **shape.model,
        layers=decoder_layers(attention, specs, of_layers, mixer=mixer),
        norm_offset=1.0,
        tied_embeddings=read.flag(fields, "tie_word_embeddings"),
        longest_text=read.longest_text(fields),
    )


FAMILIES = (
    Family("Qwen3_5ForCausalLM", "qwen3_5_text", qwen3_5),
    Family("Qwen3_5ForConditionalGeneration", "qwen3_5", with_pictures(qwen3_5_text=qwen3_5)),
    Family("Qwen3NextForCausalLM", "qwen3_next", qwen3_next),
    Family("Qwen3_5MoeForCausalLM", "qwen3_5_moe_text", qwen3_5_moe),
    Family(
        "Qwen3_5MoeForConditionalGeneration",
        "qwen3_5_moe",
        with_pictures(qwen3_5_moe_text=qwen3_5_moe),
    ),
)
