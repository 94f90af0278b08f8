# SPDX-License-Identifier: Apache-2.0
"""GLM-4.5 to 4.7 with experts: the first layers are dense, the others also have a shared expert.

Half of each head is rotated. Scores are sigmoids, and a correction of them chooses experts. Files
may have further layers that predict several tokens, which are not read.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..blocks.attention import Attention
from ..blocks.mlp import Mlp
from ..config import fields as read
from ..config.decoder_config import DecoderConfig
from ..config.expert_config import Experts, first_dense_layers, num_experts
from ..gguf.family import GgufFamily, Header
from .family import Family
from .gguf_keys import SIGMOID, experts_in_groups
from .layers import decoder_layers, mlps


def glm4_moe(fields: Mapping[str, Any]) -> DecoderConfig:
    """Read the fields of GLM-4.5, 4.6 and 4.7, and of their Air models."""
    fields = {"rms_norm_eps": 1e-5, **fields}
    num_layers = read.positive(fields, "num_hidden_layers")
    width = read.positive(fields, "moe_intermediate_size", 1408)
    experts = Experts(
        num_experts(fields, 128),
        read.positive(fields, "num_experts_per_tok", 8),
        width,
        "sigmoid",
        normalizes=read.flag(fields, "norm_topk_prob", True),
        scale=read.positive_number(fields, "routed_scaling_factor", 1.0) or 1.0,
        has_correction=True,
        num_groups=read.positive(fields, "n_group", 1),
        num_chosen_groups=read.positive(fields, "topk_group", 1),
        shared_width=width * read.positive(fields, "n_shared_experts", 1),
    )
    shape = read.shape(fields)
    attention = Attention(
        *shape.heads,
        qk_norm="head" if read.flag(fields, "use_qk_norm") else None,
        qkv_bias=read.flag(fields, "attention_bias"),
    )
    mlp = Mlp(shape.intermediate_size, read.silu(fields))
    of_layers = mlps(mlp, experts, num_layers, first_dense_layers(fields, 1))
    specs = read.layers(fields, [read.FULL] * num_layers, partial=0.5)
    return DecoderConfig(
        **shape.model,
        layers=decoder_layers(attention, specs, of_layers),
        has_draft_layers=True,
        tied_embeddings=read.flag(fields, "tie_word_embeddings"),
        longest_text=read.longest_text(fields),
    )


def _gguf_fields(header: Header) -> dict[str, Any]:
    return {
        "attention_bias": "blk.0.attn_q.bias" in header.shapes,
        "use_qk_norm": "blk.0.attn_q_norm.weight" in header.shapes,
        **experts_in_groups(header, SIGMOID),
    }


_GGUF = GgufFamily(
    "glm4moe", _gguf_fields, layer_tensors={"post_attention_norm": "post_attention_layernorm"}
)

FAMILIES = (Family("Glm4MoeForCausalLM", "glm4_moe", glm4_moe, _GGUF),)
