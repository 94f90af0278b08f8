# SPDX-License-Identifier: Apache-2.0
"""Falcon-H1: attention and a Mamba2 recurrence side by side in every layer, and many factors."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..config import fields as read
from ..config.decoder_config import DecoderConfig, Mamba2Options, Norms, Scales, TensorNames
from .family import Family
from .mamba2 import mamba2_layer, time_step_limit

_NAMES = TensorNames(final_norm="final_layernorm", mixer="mamba", mlp="feed_forward")


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
        inner = read.positive(fields, "mamba_expand", 2) * shape["hidden_size"]
    state = mamba2_layer(fields, inner)
    attention = read.layers(fields, [read.FULL])
    gate, down = read.factors(fields, "mlp_multipliers", 2)
    ssm_in = _factor(fields, "ssm_in_multiplier")
    attention_in = _factor(fields, "attention_in_multiplier")
    norm = "gate_last" if read.flag(fields, "mamba_norm_before_gate", True) else "gate_first"
    return DecoderConfig(
        **shape,
        layers=(*attention, state) * num_layers,
        layers_per_block=2,
        names=_NAMES,
        norms=Norms(before_mlp="pre_ff_layernorm"),
        scales=Scales(
            qkv=(attention_in, attention_in * _factor(fields, "key_multiplier"), attention_in),
            attention=_factor(fields, "attention_out_multiplier"),
            mixer=_factor(fields, "ssm_out_multiplier"),
            gate=gate,
            mlp=down,
            logits=_factor(fields, "lm_head_multiplier"),
        ),
        mamba2=Mamba2Options(
            norm=norm if read.flag(fields, "mamba_rms_norm") else None,
            time_step_limit=time_step_limit(fields),
            in_scales=tuple(ssm_in * x for x in read.factors(fields, "ssm_multipliers", 5)),
        ),
        activation=read.silu(fields),
        embedding_scale=_factor(fields, "embedding_multiplier"),
        tied_embeddings=read.flag(fields, "tie_word_embeddings"),
        longest_text=read.longest_text(fields),
    )


def _factor(fields: Mapping[str, Any], name: str) -> float:
    return read.positive_number(fields, name, 1.0) or 1.0


FAMILIES = (Family("FalconH1ForCausalLM", "falcon_h1", falcon_h1),)
