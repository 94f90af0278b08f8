# SPDX-License-Identifier: Apache-2.0
"""Granite 4 H without experts: Mamba2 recurrences, and some layers of attention.

Most models rotate nothing. Factors scale the embeddings, the attention logits, what a layer adds to
the residual, and the output logits.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tvm_pagedkv.config import LayerSpec

from ..blocks.attention import Attention
from ..blocks.mamba2_mixer import Mamba2
from ..blocks.mlp import Mlp, MlpNames
from ..config import fields as read
from ..config.decoder_config import DecoderConfig
from .family import Family
from .layers import decoder_layers
from .mamba2 import mamba2_layer, time_step_limit

_LINEAR = "linear_attention"
_SPELLINGS = {"mamba": _LINEAR, "attention": read.FULL}  # of older files
_MLP = MlpNames("shared_mlp", fused_gate_up="input_linear", down="output_linear")


def granite_hybrid(fields: Mapping[str, Any]) -> DecoderConfig:
    """Read the fields of a Granite 4 hybrid."""
    num_experts = fields.get("num_local_experts", 8)
    if num_experts:
        raise ValueError(
            f"Granite 4 with experts is not supported; it has {num_experts} (num_local_experts)"
        )
    for name in ("attention_bias", "mamba_proj_bias"):
        if read.flag(fields, name):
            raise ValueError(f"{name} is not supported in Granite 4, whose models have none")
    width = read.positive(fields, "shared_intermediate_size", 1024)
    shape = read.shape({**fields, "intermediate_size": width})
    state = mamba2_layer(fields, shape.hidden_size * read.positive(fields, "mamba_expand", 2))
    residual = read.positive_number(fields, "residual_multiplier", 1.0) or 1.0
    scale = read.positive_number(
        {"attention_multiplier": 1.0, **fields}, "attention_multiplier", None
    )
    attention = Attention(*shape.heads, scale=scale, output_scale=residual)
    mixer = Mamba2(state, "mamba", residual, time_step_limit=time_step_limit(fields))
    mlp = Mlp(width, read.silu(fields), output_scale=residual, names=_MLP)
    return DecoderConfig(
        **shape.model,
        layers=decoder_layers(attention, _layers(fields, state), mlp, mixer=mixer),
        logit_scale=1 / (read.positive_number(fields, "logits_scaling", 1.0) or 1.0),
        embedding_scale=read.positive_number(fields, "embedding_multiplier", 1.0) or 1.0,
        tied_embeddings=read.flag(fields, "tie_word_embeddings"),
        longest_text=read.longest_text(fields) if _rotates(fields) else None,
    )


def _rotates(fields: Mapping[str, Any]) -> bool:
    return fields.get("position_embedding_type") == "rope"


def _layers(fields: Mapping[str, Any], state: LayerSpec) -> tuple[LayerSpec, ...]:
    default = [_LINEAR] * read.positive(fields, "num_hidden_layers")
    given = fields.get("layer_types") or fields.get("layers_block_type") or default
    kinds = [_SPELLINGS.get(kind, kind) for kind in given]
    kinds = read.layer_kinds({"layer_types": kinds}, default, (read.FULL, _LINEAR))
    layers = read.layers(fields, kinds, {_LINEAR: state})
    if _rotates(fields):
        return layers
    return read.with_rope_where(layers, [each is state for each in layers])


FAMILIES = (Family("GraniteMoeHybridForCausalLM", "granitemoehybrid", granite_hybrid),)
