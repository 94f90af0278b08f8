# SPDX-License-Identifier: Apache-2.0
"""Llama 4, text: layers that attend within chunks, and every fourth one without a rotation.

Q and K of rotated layers have a norm of each head without weights; Q of the others is scaled by the
position. Experts multiply their input by the score. Some models have dense layers in between.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from tvm_pagedkv.config import LayerSpec

from ..blocks.attention import Attention
from ..blocks.mlp import Mlp, MlpNames
from ..config import fields as read
from ..config.decoder_config import DecoderConfig
from ..config.expert_config import ExpertNames, Experts, num_experts
from ..config.layer import Layer
from ..config.part import LayerPart
from ..config.query_scale import QueryScale
from .family import Family
from .layers import mlps
from .pictures import with_pictures

CHUNKED = "chunked_attention"


def llama4(fields: Mapping[str, Any]) -> DecoderConfig:
    """Read the fields of the text model of Llama 4."""
    fields = {"rope_theta": 500000.0, "rms_norm_eps": 1e-5, "head_dim": 128, **fields}
    num_layers = read.positive(fields, "num_hidden_layers")
    interval = read.positive(fields, "no_rope_layer_interval", 4)
    default = [bool((i + 1) % interval) for i in range(num_layers)]
    # An empty list, as published, stands for the interval.
    rotates = (
        read.flags(fields, "no_rope_layers", default) if fields.get("no_rope_layers") else default
    )
    kinds, states = [read.FULL] * num_layers, {}
    if fields.get("attention_chunk_size", 8192) is not None:
        chunk = read.positive(fields, "attention_chunk_size", 8192)
        states[CHUNKED] = LayerSpec("mha_chunked", chunk, rope=read.rope(fields, read.FULL))
        kinds = [CHUNKED if each else read.FULL for each in rotates]
        kinds = read.layer_kinds(fields, kinds, (read.FULL, CHUNKED))
    specs = read.with_rope_where(read.layers(fields, kinds, states), rotates)
    scale = QueryScale(
        read.positive(fields, "floor_scale", 8192),
        read.positive_number(fields, "attn_scale", 0.1) or 0.1,
        offset=1,
    )
    bias = read.flag(fields, "attention_bias")
    dense = fields.get("intermediate_size_mlp", 16384)
    shape = read.shape({**fields, "intermediate_size": dense})
    plain = Attention(
        *shape.heads,
        query_scale=scale if fields.get("attn_temperature_tuning", True) else None,
        interleaved_rope=True,
        qkv_bias=bias,
        o_bias=bias,
    )
    norm = "unit" if read.flag(fields, "use_qk_norm", True) else None
    rotated = replace(plain, qk_norm=norm, query_scale=None)
    mlp = Mlp(shape.intermediate_size, read.silu(fields), names=MlpNames("feed_forward"))
    of_layers = zip(rotates, specs, _mlps(fields, mlp, num_layers), strict=True)
    return DecoderConfig(
        **shape.model,
        layers=tuple(
            Layer(replace(rotated if is_rotated else plain, spec=spec), mlp=own)
            for is_rotated, spec, own in of_layers
        ),
        tied_embeddings=read.flag(fields, "tie_word_embeddings"),
        longest_text=read.longest_text(fields),
    )


def _mlps(fields: Mapping[str, Any], mlp: Mlp, num_layers: int) -> list[LayerPart]:
    """Return the MLP or the experts of each layer; the layers of small models are all dense."""
    dense_layers = _dense_layers(fields, num_layers)
    if len(dense_layers) == num_layers:
        return [mlp] * num_layers
    width = read.positive(fields, "intermediate_size", 8192)
    experts = Experts(
        num_experts(fields, 16),
        read.positive(fields, "num_experts_per_tok", 1),
        width,
        "sigmoid",
        normalizes=False,
        scales_inputs=True,
        shared_width=width,
        names=ExpertNames(
            block="feed_forward",
            router="router",
            shared="shared_expert",
            fused_gate_up="gate_up_proj",
            is_stacked=True,
            is_transposed=True,
        ),
    )
    return mlps(mlp, experts, num_layers, dense_layers)


def _dense_layers(fields: Mapping[str, Any], num_layers: int) -> tuple[int, ...]:
    """Return the layers without experts: those that ``moe_layers`` lacks, or by an interval."""
    listed = fields.get("moe_layers")
    if listed is None:
        step = read.positive(fields, "interleave_moe_layer_step", 1)
        listed = list(range(step - 1, num_layers, step))
    if not isinstance(listed, list) or not all(isinstance(each, int) for each in listed):
        raise ValueError(f"moe_layers must be a list of layers, got {listed!r}")
    return tuple(i for i in range(num_layers) if i not in listed)


FAMILIES = (
    Family("Llama4ForCausalLM", "llama4_text", llama4),
    Family("Llama4ForConditionalGeneration", "llama4", with_pictures(llama4_text=llama4)),
)
