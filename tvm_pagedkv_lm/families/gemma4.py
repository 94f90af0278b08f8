# SPDX-License-Identifier: Apache-2.0
"""Gemma 4, text: as Gemma 3n, without its streams, and with heads of two widths.

Layers without a window have wider heads, a part of which is rotated; in some models V is the
projection of K there. Some models have experts beside the MLP.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from ..blocks.attention import Attention
from ..blocks.beside_mlp import ExpertsBesideMlp
from ..blocks.mlp import Mlp
from ..blocks.moe import MixtureOfExperts
from ..config import fields as read
from ..config.decoder_config import DecoderConfig
from ..config.expert_config import ExpertNames, Experts
from ..config.layer import Layer
from ..gguf.family import GgufFamily, Header
from .family import Family
from .gemma import gelu
from .gemma3n import (
    GGUF_MODEL_TENSORS,
    GGUF_PER_LAYER_TENSORS,
    shared_attention,
    shared_decoder,
    shared_gguf_fields,
    sources_of,
)
from .pictures import with_pictures


def gemma4(fields: Mapping[str, Any]) -> DecoderConfig:
    """Read the fields of the text model of Gemma 4."""
    fields = {"head_dim": 256, "hidden_size_per_layer_input": 256, "sliding_window": 512, **fields}
    num_layers = read.positive(fields, "num_hidden_layers")
    default = [read.SLIDING if (i + 1) % 6 else read.FULL for i in range(num_layers)]
    kinds = [*read.layer_kinds(fields, default)[:-1], read.FULL]
    rotations = fields.get("rope_parameters") or {
        read.SLIDING: {"rope_type": "default", "rope_theta": 1e4},
        read.FULL: {
            "rope_type": "proportional", "rope_theta": 1e6, "partial_rotary_factor": 0.25,
        },
    }  # fmt: skip
    fields = {**fields, "rope_parameters": rotations}
    shares_projection = read.flag(fields, "attention_k_eq_v")
    heads = [_heads(fields, kind, i, shares_projection) for i, kind in enumerate(kinds)]
    fields["per_layer_config"] = None
    attention, sources = shared_attention(fields), sources_of(fields, kinds)
    mlp = Mlp(read.shape(fields).intermediate_size, gelu(fields))
    is_wide = read.flag(fields, "use_double_wide_mlp")
    wide = replace(mlp, width=2 * mlp.width)
    layers = [
        Layer(
            _attention(fields, attention, kind, own, shares_projection),
            mlp=wide if is_wide and i in sources else mlp,
            beside_mlp=_experts(fields, mlp),
            has_scale=True,
        )
        for i, (kind, own) in enumerate(zip(kinds, heads, strict=True))
    ]
    return shared_decoder(fields, layers, kinds)


def _experts(fields: Mapping[str, Any], mlp: Mlp) -> ExpertsBesideMlp | None:
    """Return the experts that layers have beside the MLP, if there are any."""
    if not read.flag(fields, "enable_moe_block"):
        return None
    experts = Experts(
        read.positive(fields, "num_experts"),
        read.positive(fields, "top_k_experts"),
        read.positive(fields, "moe_intermediate_size"),
        has_expert_scale=True,
        names=ExpertNames(
            block="", router="router.proj", fused_gate_up="gate_up_proj", is_stacked=True
        ),
    )
    return ExpertsBesideMlp(MixtureOfExperts(experts, mlp))


def _heads(
    fields: Mapping[str, Any], kind: str, index: int, shares_projection: bool
) -> tuple[int, int]:
    """Return the number of KV heads of a layer, and their width."""
    own: dict[str, Any] = {}
    given = fields.get("per_layer_config")
    if given is not None:
        if not isinstance(given, Mapping):
            raise ValueError(f"per_layer_config must be an object, got {given!r}")
        own = next((each for key, each in given.items() if int(key) == index), {})
    elif kind == read.FULL:
        own = {"head_dim": read.positive(fields, "global_head_dim", 512)}
        if shares_projection and fields.get("num_global_key_value_heads") is not None:
            own["num_key_value_heads"] = fields["num_global_key_value_heads"]
    unknown = set(own) - {"head_dim", "num_key_value_heads"}
    if unknown:
        raise ValueError(f"per_layer_config of layer {index} has {', '.join(sorted(unknown))}")
    whole = {**fields, **own}
    return read.positive(whole, "num_key_value_heads", 4), read.positive(whole, "head_dim")


def _attention(
    fields: Mapping[str, Any],
    attention: Attention,
    kind: str,
    heads: tuple[int, int],
    shares_projection: bool,
) -> Attention:
    num_kv_heads, head_dim = heads
    (spec,) = read.layers({**fields, "head_dim": head_dim}, [kind])
    return replace(
        attention,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        spec=replace(spec, num_kv_heads=num_kv_heads, qk_head_dim=head_dim, v_head_dim=head_dim),
        v_is_k=shares_projection and kind == read.FULL,
    )


# --- GGUF ---------------------------------------------------------------------------------------

_UNROTATED = 1e20  # what is above it, the files divide frequencies by that stand for none


def _gguf_fields(header: Header) -> dict[str, Any]:
    key, shapes = header.key, header.shapes
    own = shared_gguf_fields(header)
    kinds, num_shared = own["layer_types"], own["num_kv_shared_layers"]
    head_dim = key("attention.key_length_swa", int)
    for name in ("attention.value_length_swa", "rope.dimension_count_swa"):
        if key(name, int, head_dim) != head_dim:
            raise ValueError(f"gemma4.{name} must be {head_dim}")
    keeps_kv = range(len(kinds) - num_shared)
    full = [i for i in keeps_kv if kinds[i] == read.FULL]
    without_v = [i for i in full if f"blk.{i}.attn_v.weight" not in shapes]
    if without_v not in ([], full):
        raise ValueError(f"the file lacks the tensor blk.{without_v[0]}.attn_v.weight")
    heads, widths = (
        key(name, object) for name in ("attention.head_count_kv", "feed_forward_length")
    )
    heads = heads if isinstance(heads, list) else [heads] * len(kinds)
    widths = widths if isinstance(widths, list) else [widths] * len(kinds)
    if len(heads) != len(kinds) or len(widths) != len(kinds):
        raise ValueError("gemma4 needs head_count_kv and feed_forward_length for each layer")
    of_kind = {kind: heads[i] for i, kind in reversed(list(enumerate(kinds)))}
    theta = key("rope.freq_base_swa", float)
    own |= {
        "head_dim": head_dim,
        "global_head_dim": header.fields["head_dim"],
        "num_key_value_heads": of_kind.get(read.SLIDING, heads[0]),
        "attention_k_eq_v": bool(without_v),
        "intermediate_size": widths[0],
        "use_double_wide_mlp": widths[-1] == 2 * widths[0],
        "rope_parameters": {
            read.SLIDING: {"rope_type": "default", "rope_theta": theta},
            read.FULL: {
                "rope_type": "proportional",
                "rope_theta": header.fields["rope_theta"],
                "partial_rotary_factor": _rotated_share(header.read("rope_freqs.weight")),
            },
        },
    }
    if without_v:
        own["num_global_key_value_heads"] = of_kind[read.FULL]
    if key("expert_count", int, 0):
        own |= {
            "enable_moe_block": True,
            "num_experts": key("expert_count", int),
            "top_k_experts": key("expert_used_count", int),
            "moe_intermediate_size": key("expert_feed_forward_length", int),
            "num_experts_per_tok": key("expert_used_count", int),
        }
    return own


def _rotated_share(factors: np.ndarray) -> float:
    """Return the share of a head that is rotated, of factors that are 1 for it, then huge."""
    count = int((factors == 1).sum())
    if not (factors[:count] == 1).all() or not (factors[count:] > _UNROTATED).all():
        raise ValueError("the factors in tensor rope_freqs.weight are not those of Gemma 4")
    return count / len(factors)


_GGUF = GgufFamily(
    "gemma4",
    _gguf_fields,
    layer_tensors=GGUF_PER_LAYER_TENSORS
    | {
        "pre_ffw_norm_2": "pre_feedforward_layernorm_2",
        "post_ffw_norm_1": "post_feedforward_layernorm_1",
        "post_ffw_norm_2": "post_feedforward_layernorm_2",
    },
    model_tensors=GGUF_MODEL_TENSORS,
    whole_names={
        "layer_output_scale.weight": "layer_scalar",
        "ffn_gate_inp.weight": "router.proj.weight",
        "ffn_gate_inp.scale": "router.scale",
        "ffn_gate_up_exps.weight": "experts.gate_up_proj",
        "ffn_down_exps.weight": "experts.down_proj",
        "ffn_down_exps.scale": "router.per_expert_scale",
    },
    layers_differ=True,
)

FAMILIES = (
    Family("Gemma4ForCausalLM", "gemma4_text", gemma4, _GGUF),
    Family("Gemma4ForConditionalGeneration", "gemma4", with_pictures(gemma4_text=gemma4)),
)
