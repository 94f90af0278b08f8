# SPDX-License-Identifier: Apache-2.0
"""MiniMax M3: in most layers, rows attend to blocks of positions that an indexer chooses.

Experts are chosen as in MiniMax M2, and a shared one joins them; their gates are clamped as in
GPT-OSS. Each head of Q and K has a norm. The first layers are dense and attend to all positions.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from tvm_pagedkv.config import LayerSpec

from ..blocks.attention import Attention, AttentionNames
from ..blocks.mlp import Mlp, MlpNames
from ..config import fields as read
from ..config.decoder_config import DecoderConfig, TensorNames
from ..config.expert_config import ExpertNames, Experts, num_experts
from ..config.index_config import Blocks, IndexConfig
from ..config.layer import Layer
from ..config.part import LayerPart
from .family import Family
from .gpt_oss import clamped_gate
from .layers import mlps
from .minimax import NAMES, with_partial_rotation

_SPARSE = "minimax_m3_sparse"  # in layer_types
# Names of the same fields where they are in an object of their own.
_IN_SPARSE_CONFIG = {
    "index_n_heads": "sparse_num_index_heads",
    "index_head_dim": "sparse_index_dim",
    "index_block_size": "sparse_block_size",
    "index_topk_blocks": "sparse_topk_blocks",
    "index_init_blocks": "sparse_init_block",
    "index_local_blocks": "sparse_local_block",
}
# What the published models have; others would need other code.
_ONLY = {
    "use_gemma_norm": True,
    "qk_norm_type": "per_head",
    "attention_output_gate": False,
    "scoring_func": "sigmoid",
    "sparse_score_type": "max",
}


def minimax_m3(fields: Mapping[str, Any]) -> DecoderConfig:
    """Read the fields of MiniMax M3 as published, with an encoder of pictures."""
    config = _decoder(read.text_model(fields), NAMES, AttentionNames(index="index_"), MlpNames())
    names = TensorNames(model="language_model.model", lm_head="language_model.lm_head")
    return replace(config, names=names)


def minimax_m3_text(fields: Mapping[str, Any]) -> DecoderConfig:
    """Read the fields of the text model alone, whose tensors are named as in transformers."""
    names = ExpertNames(fused_gate_up="gate_up_proj", is_stacked=True)
    return _decoder(fields, names, AttentionNames(), MlpNames(fused_gate_up="gate_up_proj"))


def _decoder(
    fields: Mapping[str, Any],
    expert_names: ExpertNames,
    attention_names: AttentionNames,
    mlp_names: MlpNames,
) -> DecoderConfig:
    sparse = fields.get("sparse_attention_config") or {}
    if not isinstance(sparse, Mapping):
        raise ValueError(f"sparse_attention_config must be an object, got {sparse!r}")
    given = {ours: sparse[name] for ours, name in _IN_SPARSE_CONFIG.items() if name in sparse}
    fields = with_partial_rotation({**fields, **given})
    for name, only in _ONLY.items():
        value = {**fields, **sparse}.get(name, only)
        if value != only:
            raise ValueError(f"{name} must be {only!r} in MiniMax M3, got {value!r}")
    num_layers = read.positive(fields, "num_hidden_layers")
    frequency = sparse.get("sparse_attention_freq")
    if frequency is not None and fields.get("layer_types") is None:
        chooses = read.flags(sparse, "sparse_attention_freq", [True] * num_layers)
        fields = {**fields, "layer_types": [_SPARSE if each else read.FULL for each in chooses]}
    kinds = read.layer_kinds(fields, [read.FULL] * num_layers, (read.FULL, _SPARSE))
    if not sparse.get("use_sparse_attention", True):
        kinds = [read.FULL] * num_layers
    shape, index = read.shape(fields), _index(fields)
    if shape.num_kv_heads % index.num_heads:
        raise ValueError(
            f"index_n_heads ({index.num_heads}) must divide num_key_value_heads "
            f"({shape.num_kv_heads}): a head chooses for some KV heads"
        )
    attention = Attention(*shape.heads, qk_norm="head", names=attention_names)
    known = {"silu": "silu", "swigluoai": "silu"}
    mlp = Mlp(
        read.positive(fields, "dense_intermediate_size", 12288),
        read.activation(fields, "hidden_act", known, "silu"),
        clamped_gate=clamped_gate(fields),
        names=mlp_names,
    )
    of_layers = zip(kinds, _mlps(fields, mlp, expert_names, num_layers), strict=True)
    return DecoderConfig(
        **shape.model,
        layers=tuple(
            Layer(
                replace(
                    attention,
                    spec=LayerSpec(rope=index.rope, lists=kind == _SPARSE),
                    index=replace(index, chooses=kind == _SPARSE),
                ),
                mlp=own,
            )
            for kind, own in of_layers
        ),
        norm_offset=1.0,
        has_draft_layers=True,
        tied_embeddings=read.flag(fields, "tie_word_embeddings"),
        longest_text=read.longest_text(fields),
    )


def _mlps(
    fields: Mapping[str, Any], mlp: Mlp, names: ExpertNames, num_layers: int
) -> list[LayerPart]:
    """Return the experts of each layer, or the MLP of those without experts."""
    has_experts = read.flags(fields, "moe_layer_freq", [True] * num_layers)
    if fields.get("mlp_layer_types") is not None:
        kinds = fields["mlp_layer_types"]
        if len(kinds) != num_layers or not set(kinds) <= {"dense", "sparse"}:
            raise ValueError(
                f"mlp_layer_types must say dense or sparse for {num_layers} layers, got {kinds!r}"
            )
        has_experts = [kind == "sparse" for kind in kinds]
    experts = Experts(
        num_experts(fields, 128),
        read.positive(fields, "num_experts_per_tok", 4),
        read.positive(fields, "intermediate_size", 3072),
        "sigmoid",
        scale=read.positive_number(fields, "routed_scaling_factor", 2.0) or 2.0,
        has_correction=True,
        shared_width=read.positive(fields, "shared_intermediate_size", 3072),
        names=names,
    )
    dense_layers = [i for i, each in enumerate(has_experts) if not each]
    return mlps(mlp, experts, num_layers, dense_layers)


def _index(fields: Mapping[str, Any]) -> IndexConfig:
    """Return the index heads, which rotate as attention does."""
    rotation = read.rope(fields, read.FULL, partial=1.0)
    index = IndexConfig(
        read.positive(fields, "index_n_heads", 4),
        read.positive(fields, "index_head_dim", 128),
        read.positive(fields, "index_topk_blocks", 16),
        is_interleaved=False,
        blocks=Blocks(
            read.positive(fields, "index_block_size", 128),
            read.not_negative(fields, "index_init_blocks", 0),
            read.not_negative(fields, "index_local_blocks", 1),
        ),
        rope=rotation,
    )
    if index.dim < (rotation.rotary_dim or 0):
        raise ValueError(
            f"index_head_dim ({index.dim}) must be at least the rotated part of a head "
            f"({rotation.rotary_dim})"
        )
    return index


FAMILIES = (
    Family("MiniMaxM3VLForCausalLM", "minimax_m3_vl_text", minimax_m3_text),
    Family("MiniMaxM3SparseForConditionalGeneration", "minimax_m3_vl", minimax_m3),
)
