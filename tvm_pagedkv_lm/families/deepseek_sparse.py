# SPDX-License-Identifier: Apache-2.0
"""DeepSeek V3.2 and GLM-5: DeepSeek V3, whose rows attend to positions that an indexer chooses.

GLM-5 rotates adjacent features of index heads, and some of its layers attend to what the last
layer with an indexer has chosen.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from ..blocks.latent import LatentAttention
from ..blocks.latent_choice import SparseLatentAttention
from ..config import fields as read
from ..config.decoder_config import DecoderConfig
from ..config.index_config import IndexConfig
from .deepseek import V3_DEFAULTS, with_corrected_choice, with_dense_layers
from .family import Family

_CHOOSES, _SHARES = "full", "shared"  # indexer_types; "F" and "S" in index_topk_pattern


def deepseek_v32(fields: Mapping[str, Any]) -> DecoderConfig:
    """Read the fields of DeepSeek V3.2."""
    num_layers = read.positive(fields, "num_hidden_layers")
    fields = {**V3_DEFAULTS, **fields}
    return _with_indexer(fields, range(num_layers), num_heads=64, is_interleaved=False)


def glm_moe_dsa(fields: Mapping[str, Any]) -> DecoderConfig:
    """Read the fields of GLM-5."""
    kinds = _indexer_kinds(fields)
    choosing = [index for index, kind in enumerate(kinds) if kind == _CHOOSES]
    fields = {"rms_norm_eps": 1e-5, "routed_scaling_factor": 2.5, **fields}
    return _with_indexer(fields, choosing, num_heads=32, is_interleaved=True)


def _indexer_kinds(fields: Mapping[str, Any]) -> list[str]:
    """Return for each layer whether it chooses: a list, a pattern or a period of the file."""
    num_layers = read.positive(fields, "num_hidden_layers")
    name = "indexer_types" if fields.get("indexer_types") is not None else "index_topk_pattern"
    given = fields.get(name)
    if given is None:
        period = read.positive(fields, "index_topk_freq", 1)
        begin = read.positive(fields, "index_skip_topk_offset", 2) - 1
        chooses = [max(i - begin, 0) % period == 0 for i in range(num_layers)]
        return [_CHOOSES if each else _SHARES for each in chooses]
    letters = {"F": _CHOOSES, "S": _SHARES}
    kinds = [letters.get(each, each) for each in given]
    if len(kinds) != num_layers or not set(kinds) <= {_CHOOSES, _SHARES}:
        raise ValueError(
            f"{name} must say {_CHOOSES} or {_SHARES} for {num_layers} layers, got {given!r}"
        )
    if kinds[0] != _CHOOSES:
        raise ValueError(f"{name}: the first layer must be {_CHOOSES}, got {given!r}")
    return kinds


def _with_indexer(
    fields: Mapping[str, Any], choosing, *, num_heads: int, is_interleaved: bool
) -> DecoderConfig:
    fields = {"first_k_dense_replace": 3, **with_dense_layers(fields)}
    for name, only in (("rope_interleave", True), ("indexer_rope_interleave", is_interleaved)):
        if read.flag(fields, name, only) != only:
            raise ValueError(f"{name} must be {str(only).lower()} in models of this kind")
    config = with_corrected_choice(fields)
    latent = config.find(LatentAttention)
    assert latent is not None
    shape = latent.shape
    if shape.q_rank is None:
        raise ValueError("q_lora_rank is required: the indexer projects its heads from it")
    indexer = IndexConfig(
        read.positive(fields, "index_n_heads", num_heads),
        read.positive(fields, "index_head_dim", 128),
        read.positive(fields, "index_topk", 2048),
        is_interleaved,
    )
    if indexer.dim < shape.rope_dim:
        raise ValueError(
            f"index_head_dim ({indexer.dim}) must be at least qk_rope_head_dim ({shape.rope_dim})"
        )
    # Attention to lists is absorbed, so heads before absorption need no kernels.
    spec = replace(
        latent.spec, lists=True, mla_original_qk_head_dim=None, mla_original_v_head_dim=None
    )
    how = latent.num_heads, shape, spec, latent.scale, latent.down_bias, latent.o_bias
    of_kind = {
        chooses: SparseLatentAttention(*how, index=replace(indexer, chooses=chooses))
        for chooses in (False, True)
    }
    layers = (
        replace(layer, attention=of_kind[i in choosing]) for i, layer in enumerate(config.layers)
    )
    return replace(config, layers=tuple(layers))


FAMILIES = (
    Family("DeepseekV32ForCausalLM", "deepseek_v32", deepseek_v32),
    Family("GlmMoeDsaForCausalLM", "glm_moe_dsa", glm_moe_dsa),
)
