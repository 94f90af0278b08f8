# SPDX-License-Identifier: Apache-2.0
"""Llama, Mistral, Ministral 3 and Mixtral: norms before attention and MLP, SwiGLU.

Q of Ministral 3 grows with the position, in every layer.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..blocks.attention import Attention
from ..blocks.mlp import Mlp
from ..config import fields as read
from ..config.decoder_config import DecoderConfig
from ..config.expert_config import ExpertNames, Experts, num_experts
from ..config.query_scale import QueryScale
from ..gguf.family import GgufFamily, Header
from .deepseek import mistral4
from .family import Family
from .gguf_keys import SOFTMAX, expert_counts
from .layers import decoder_layers, mlps
from .pictures import with_pictures

_MINISTRAL3_ROPE = {
    "rope_type": "yarn",
    "rope_theta": 1e6,
    "factor": 16.0,
    "original_max_position_embeddings": 16384,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "llama_4_scaling_beta": 0.1,
}


def llama(fields: Mapping[str, Any]) -> DecoderConfig:
    """Read the fields of Llama 1 to 3 and of models with its architecture (TinyLlama, Yi, ...).

    Some converters write a ``sliding_window``, which models of this architecture do not have.
    """
    return _decoder(fields, read.FULL)


def mistral(fields: Mapping[str, Any]) -> DecoderConfig:
    """Read the fields of Mistral 7B and Nemo. Version 0.1 has a window in every layer."""
    fields = {"sliding_window": 4096, **fields}
    return _decoder(fields, _mistral_kind(fields))


def ministral3(fields: Mapping[str, Any]) -> DecoderConfig:
    """Read the fields of the text models of Ministral 3."""
    fields = {"head_dim": 128, "num_key_value_heads": 8, "rms_norm_eps": 1e-5, **fields}
    rope = read.rope_fields(fields) or _MINISTRAL3_ROPE
    fields |= {"rope_parameters": rope, "rope_scaling": None}
    growth = read.query_growth(fields, rope)
    scale = None if growth is None else QueryScale(floor=growth[1], factor=growth[0])
    return _decoder(fields, _mistral_kind(fields), query_scale=scale)


def mixtral(fields: Mapping[str, Any]) -> DecoderConfig:
    """Read the fields of Mixtral: Mistral with experts in place of MLPs."""
    fields = {"rms_norm_eps": 1e-5, "rope_theta": 1e6, **fields}
    experts = Experts(
        num_experts(fields, 8),
        read.positive(fields, "num_experts_per_tok", 2),
        read.positive(fields, "intermediate_size"),
        names=ExpertNames("block_sparse_moe", gate="w1", up="w3", down="w2"),
    )
    return _decoder(fields, _mistral_kind(fields), experts=experts)


def _mistral_kind(fields: Mapping[str, Any]) -> str:
    return read.FULL if fields.get("sliding_window") is None else read.SLIDING


def _decoder(
    fields: Mapping[str, Any],
    kind: str,
    *,
    query_scale: QueryScale | None = None,
    experts: Experts | None = None,
) -> DecoderConfig:
    shape, bias = read.shape(fields), read.flag(fields, "attention_bias")
    num_layers = read.positive(fields, "num_hidden_layers")
    attention = Attention(*shape.heads, qkv_bias=bias, o_bias=bias, query_scale=query_scale)
    mlp = Mlp(shape.intermediate_size, read.silu(fields), read.flag(fields, "mlp_bias"))
    specs = read.layers(fields, [kind] * num_layers)
    return DecoderConfig(
        **shape.model,
        layers=decoder_layers(
            attention, specs, mlp if experts is None else mlps(mlp, experts, num_layers)
        ),
        tied_embeddings=read.flag(fields, "tie_word_embeddings"),
        longest_text=read.longest_text(fields),
    )


def _gguf_fields(header: Header) -> dict[str, Any]:
    """Return the fields of Llama, or of Mixtral, whose files have the same architecture."""
    if header.fields["partial_rotary_factor"] != 1:
        raise ValueError(f"llama.rope.dimension_count must be {header.fields['head_dim']}")
    own = {
        "attention_bias": "blk.0.attn_q.bias" in header.shapes,
        "mlp_bias": "blk.0.ffn_gate.bias" in header.shapes,
    }
    if not header.key("expert_count", int, 0):
        return own
    counts = expert_counts(header, "num_local_experts", SOFTMAX)
    return {**own, "architectures": ["MixtralForCausalLM"], **counts}


FAMILIES = (
    Family(
        "LlamaForCausalLM", "llama", llama, GgufFamily("llama", _gguf_fields, permutes_heads=True)
    ),
    Family("MistralForCausalLM", "mistral", mistral),
    Family(
        "Mistral3ForConditionalGeneration",
        "mistral3",
        with_pictures(mistral=mistral, ministral3=ministral3, mistral4=mistral4),
    ),
    Family("Ministral3ForCausalLM", "ministral3", ministral3),
    Family("MixtralForCausalLM", "mixtral", mixtral),
)
