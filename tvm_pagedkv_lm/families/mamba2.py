# SPDX-License-Identifier: Apache-2.0
"""Mamba2: layers of a state-space recurrence alone, without attention and without an MLP."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from tvm_pagedkv.config import ConvConfig, LayerSpec, RecurrentConfig

from ..blocks.mamba2_mixer import Mamba2
from ..config import fields as read
from ..config.decoder_config import DecoderConfig, TensorNames
from ..config.layer import Layer, Norms
from .family import Family

_NAMES = TensorNames(model="backbone", embedding="embeddings", final_norm="norm_f")
# What hybrids call the fields of the state -> their names here, and defaults.
_STATE = {
    "mamba_n_heads": ("num_heads", 128),
    "mamba_d_head": ("head_dim", 64),
    "mamba_n_groups": ("n_groups", 8),
    "mamba_d_state": ("state_size", 128),
    "mamba_d_conv": ("conv_kernel", 4),
    "mamba_conv_bias": ("use_conv_bias", True),
}


def mamba2(fields: Mapping[str, Any]) -> DecoderConfig:
    """Read the fields of Mamba2. The residual has the type of the model."""
    hidden_size = read.positive(fields, "hidden_size", 4096)
    state = {ours: fields.get(name, default) for ours, (name, default) in _STATE.items()}
    spec = mamba2_layer(state, hidden_size * read.positive(fields, "expand", 2))
    read.silu(fields)
    bias = read.flag(fields, "use_bias")
    mixer = Mamba2(spec, time_step_limit=time_step_limit(fields), in_bias=bias, out_bias=bias)
    layer = Layer(mixer=mixer, norms=Norms(before_attention="norm", before_mlp=None))
    return DecoderConfig(
        vocab_size=read.positive(fields, "vocab_size"),
        hidden_size=hidden_size,
        num_heads=1,  # of attention, which no layer has
        num_kv_heads=1,
        head_dim=8,
        layers=(layer,) * read.positive(fields, "num_hidden_layers", 64),
        # A recurrence has no limit; this is what the host plans with at most.
        context_length=read.positive(fields, "max_position_embeddings", 1 << 20),
        norm_eps=read.positive_number(fields, "layer_norm_epsilon", 1e-5) or 1e-5,
        names=_NAMES,
        tied_embeddings=read.flag(fields, "tie_word_embeddings"),
    )


def mamba2_layer(fields: Mapping[str, Any], inner: int) -> LayerSpec:
    """Return the layer that the ``mamba_*`` fields of a hybrid describe.

    Parameters
    ----------
    fields : mapping
    inner : int
        Width of x: heads times their width.
    """
    num_heads = read.positive(fields, "mamba_n_heads", 128)
    given = fields.get("mamba_d_head")
    head_dim = inner // num_heads if given in (None, "auto") else given
    if num_heads * head_dim != inner:
        raise ValueError(f"{num_heads} heads of width {head_dim} must be {inner} together")
    state = RecurrentConfig(
        "mamba2",
        num_heads,
        read.positive(fields, "mamba_n_groups", 1),
        read.positive(fields, "mamba_d_state", 256),
        head_dim,
    )
    channels = inner + 2 * state.num_key_heads * state.key_dim
    has_bias = read.flag(fields, "mamba_conv_bias", True)
    conv = ConvConfig(channels, read.positive(fields, "mamba_d_conv", 4), "silu", has_bias)
    return LayerSpec("recurrent", recurrent=state, conv=conv)


def time_step_limit(fields: Mapping[str, Any]) -> tuple[float, float]:
    """Return the bounds of the time step.

    Files write infinity as ``{"__float__": "Infinity"}``.
    """
    limit = fields.get("time_step_limit")
    if limit is None:
        return (0.0, math.inf)
    try:
        low, high = (float(x["__float__"] if isinstance(x, Mapping) else x) for x in limit)
    except (KeyError, TypeError, ValueError):
        raise ValueError(f"time_step_limit must be two numbers, got {limit!r}") from None
    return low, high


FAMILIES = (Family("Mamba2ForCausalLM", "mamba2", mamba2),)
