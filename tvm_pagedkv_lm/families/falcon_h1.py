# SPDX-License-Identifier: Apache-2.0
"""Falcon-H1: attention and a Mamba2 recurrence side by side in every layer, and many factors."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..blocks.attention import Attention
from ..blocks.mamba2_mixer import Mamba2
from ..blocks.mlp import Mlp, MlpNames
from ..config import fields as read
from ..config.decoder_config import DecoderConfig, TensorNames
from ..config.layer import Layer, Norms
from .family import Family
from .mamba2 import mamba2_layer, time_step_limit


def falcon_h1(fields: Mapping[str, Any]) -> DecoderConfig:
    """Read the fields of Falcon-H1."""
    fields = {"rms_norm_eps": 1e-5, **fields}
    for name in ("attention_bias", "mlp_bias", "mamba_proj_bias", "projectors_bias"):
        if read.flag(fields, name):
            raise ValueError(f"{name} is not supported in Falcon-H1, whose models have none")
    shape = read.shape(fields)
    num_layers = read.positive(fields, "num_hidden_layers")
    inner = fields.get("mamba_d_ssm", 1024)
    if inner is None:
        inner = read.positive(fields, "mamba_expand", 2) * shape.hidden_size
    state = mamba2_layer(fields, inner)
    (spec,) = read.layers(fields, [read.FULL])
    gate, down = read.factors(fields, "mlp_multipliers", 2)
    ssm_in = _factor(fields, "ssm_in_multiplier")
    attention_in = _factor(fields, "attention_in_multiplier")
    norm = "gate_last" if read.flag(fields, "mamba_norm_before_gate", True) else "gate_first"
    attention = Attention(
        *shape.heads,
        spec=spec,
        qkv_scales=(attention_in, attention_in * _factor(fields, "key_multiplier"), attention_in),
        output_scale=_factor(fields, "attention_out_multiplier"),
    )
    mixer = Mamba2(
        state,
        "mamba",
        _factor(fields, "ssm_out_multiplier"),
        norm=norm if read.flag(fields, "mamba_rms_norm") else None,
        time_step_limit=time_step_limit(fields),
        in_scales=tuple(ssm_in * x for x in read.factors(fields, "ssm_multipliers", 5)),
    )
    mlp = Mlp(
        shape.intermediate_size,
        read.silu(fields),
        gate_scale=gate,
        output_scale=down,
        names=MlpNames("feed_forward"),
    )
    layer = Layer(attention, mixer, mlp, norms=Norms(before_mlp="pre_ff_layernorm"))
    return DecoderConfig(
        **shape.model,
        layers=(layer,) * num_layers,
        logit_scale=_factor(fields, "lm_head_multiplier"),
        names=TensorNames(final_norm="final_layernorm"),
        embedding_scale=_factor(fields, "embedding_multiplier"),
        tied_embeddings=read.flag(fields, "tie_word_embeddings"),
        longest_text=read.longest_text(fields),
    )


def _factor(fields: Mapping[str, Any], name: str) -> float:
    return read.positive_number(fields, name, 1.0) or 1.0


FAMILIES = (Family("FalconH1ForCausalLM", "falcon_h1", falcon_h1),)
