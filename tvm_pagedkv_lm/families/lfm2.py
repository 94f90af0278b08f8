# SPDX-License-Identifier: Apache-2.0
"""LFM2: short convolutions between two gates, and layers of attention with norms of Q and K."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tvm_pagedkv.config import ConvConfig, LayerSpec

from ..config import fields as read
from ..config.decoder_config import DecoderConfig, Norms, TensorNames
from .family import Family

_CONV = "conv"
_NAMES = TensorNames(
    final_norm="embedding_norm",
    mixer="conv",
    mlp="feed_forward",
    q_norm="q_layernorm",
    k_norm="k_layernorm",
    attention_output="out_proj",
    gate="w1",
    up="w3",
    down="w2",
)


def lfm2(fields: Mapping[str, Any]) -> DecoderConfig:
    """Read the fields of the dense LFM2."""
    epsilon = read.positive_number(fields, "norm_eps", 1e-5)
    fields = {"rope_theta": 1e6, **fields, "rms_norm_eps": epsilon}
    num_layers = read.positive(fields, "num_hidden_layers")
    attends = fields.get("full_attn_idxs")
    attends = range(num_layers) if attends is None else attends
    default = [read.FULL if i in attends else _CONV for i in range(num_layers)]
    shape = read.shape({**fields, "intermediate_size": _mlp_width(fields)})
    conv = ConvConfig(
        shape["hidden_size"],
        read.positive(fields, "conv_L_cache", 3),
        has_bias=read.flag(fields, "conv_bias"),
    )
    kinds = read.layer_kinds(fields, default, (read.FULL, _CONV))
    tied = fields.get("tie_embedding")
    return DecoderConfig(
        **shape,
        layers=read.layers(fields, kinds, {_CONV: LayerSpec("conv", conv=conv)}),
        names=_NAMES,
        norms=Norms(before_attention="operator_norm", before_mlp="ffn_norm"),
        qk_norm="head",
        tied_embeddings=read.flag(fields, "tie_word_embeddings", True if tied is None else tied),
        longest_text=read.longest_text(fields),
    )


def _mlp_width(fields: Mapping[str, Any]) -> int:
    """Return the width of the MLP, which files give before an adjustment."""
    name = "block_ff_dim" if fields.get("block_ff_dim") else "intermediate_size"
    width = read.positive(fields, name)
    if not read.flag(fields, "block_auto_adjust_ff_dim", True):
        return width
    factor = read.positive_number(fields, "block_ffn_dim_multiplier", 1.0) or 1.0
    multiple = read.positive(fields, "block_multiple_of", 256)
    return -(-int(factor * int(2 * width / 3)) // multiple) * multiple


FAMILIES = (Family("Lfm2ForCausalLM", "lfm2", lfm2),)
