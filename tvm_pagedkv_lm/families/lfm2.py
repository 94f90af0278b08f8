# SPDX-License-Identifier: Apache-2.0
"""LFM2: short convolutions between two gates, and layers of attention with norms of Q and K."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tvm_pagedkv.config import ConvConfig, LayerSpec

from ..blocks.attention import Attention, AttentionNames
from ..blocks.mlp import Mlp, MlpNames
from ..blocks.short_conv import ShortConv
from ..config import fields as read
from ..config.decoder_config import DecoderConfig, TensorNames
from ..config.layer import Norms
from .family import Family
from .layers import decoder_layers

_CONV = "conv"
_ATTENTION = AttentionNames(q_norm="q_layernorm", k_norm="k_layernorm", output="out_proj")
_MLP = MlpNames("feed_forward", gate="w1", up="w3", down="w2")


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
        shape.hidden_size,
        read.positive(fields, "conv_L_cache", 3),
        has_bias=read.flag(fields, "conv_bias"),
    )
    kinds = read.layer_kinds(fields, default, (read.FULL, _CONV))
    tied, spec = fields.get("tie_embedding"), LayerSpec("conv", conv=conv)
    attention = Attention(*shape.heads, qk_norm="head", names=_ATTENTION)
    return DecoderConfig(
        **shape.model,
        layers=decoder_layers(
            attention,
            read.layers(fields, kinds, {_CONV: spec}),
            Mlp(shape.intermediate_size, names=_MLP),
            mixer=ShortConv(spec, "conv"),
            norms=Norms(before_attention="operator_norm", before_mlp="ffn_norm"),
        ),
        names=TensorNames(final_norm="embedding_norm"),
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
