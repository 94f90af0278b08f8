# SPDX-License-Identifier: Apache-2.0
"""Gemma 3n and Gemma 4, text: layers that share K and V, and inputs for each layer.

The last layers attend to the K and V of the last layer before them that has a window, or none, as
they do. Q, K and V have norms of each head, which are all that scales attention. Each layer gets
a part of a second table of embeddings. Gemma 3n has several residual streams besides, low-rank
products beside attention, and MLPs whose gates are cut off. In Gemma 4, layers without a window
have wider heads, a part of which is rotated; in some models V is the projection of K there.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from statistics import NormalDist
from typing import Any

from tvm_pagedkv.config import LayerSpec

from ..config import fields as read
from ..config.altup_config import AltUp, PerLayerInputs
from ..config.decoder_config import DecoderConfig
from ..config.expert_config import ExpertNames, Experts
from .gemma import NORMS

_GELU = {"gelu_pytorch_tanh": "gelu_tanh"}


def gemma3n(fields: Mapping[str, Any]) -> DecoderConfig:
    """Read the fields of the text model of Gemma 3n."""
    defaults = {
        "head_dim": 256,
        "hidden_size_per_layer_input": 256,
        "num_kv_shared_layers": 15,
        "final_logit_softcapping": 30.0,
    }
    fields = {**defaults, **fields}
    num_layers = read.positive(fields, "num_hidden_layers")
    widths = read.numbers(fields, "intermediate_size", num_layers, 16384)
    if not all(isinstance(width, int) and width > 0 for width in widths):
        raise ValueError(f"intermediate_size must be positive integers, got {widths!r}")
    fields["intermediate_size"] = widths[0]
    default = [read.FULL if (i + 1) % 5 == 0 else read.SLIDING for i in range(num_layers)]
    kinds = read.layer_kinds(fields, default)
    theta = read.positive_number(fields, "rope_theta", 1e6)
    local = read.positive_number(fields, "rope_local_base_freq", 1e4)
    layers = read.layers(
        read.with_rotations({"sliding_window": 512, **fields}, full=theta, sliding=local), kinds
    )
    num_sparse = 10 if num_layers > 10 else 0
    shares = [0.95] * num_sparse + [0.0] * (num_layers - num_sparse)
    if fields.get("activation_sparsity_pattern") is not None:
        shares = read.numbers(fields, "activation_sparsity_pattern", num_layers)
    if not all(0 <= share < 1 for share in shares):
        raise ValueError(f"activation_sparsity_pattern must be of [0, 1), got {shares!r}")
    num_streams = read.positive(fields, "altup_num_inputs", 4)
    altup = AltUp(
        num_streams,
        _count(fields, "altup_active_idx", 0, num_streams - 1),
        read.positive(fields, "laurel_rank", 64),
        read.flag(fields, "altup_correct_scale", True),
    )
    return _decoder(
        fields,
        layers,
        kinds,
        wide_layers=tuple(enumerate(widths)),
        sparse_layers=tuple(
            (i, NormalDist().inv_cdf(share)) for i, share in enumerate(shares) if share > 0
        ),
        altup=altup,
    )


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
    layers = tuple(
        _layer(fields, kind, _heads(fields, kind, index, shares_projection))
        for index, kind in enumerate(kinds)
    )
    fields["per_layer_config"] = None
    config = _decoder(fields, layers, kinds, layer_scale=True, experts=_experts(fields))
    if read.flag(fields, "use_double_wide_mlp"):
        width = 2 * config.intermediate_size
        config = replace(config, wide_layers=tuple((i, width) for i, _ in config.shared_kv))
    if shares_projection:
        own = [i for i, kind in enumerate(kinds) if kind == read.FULL]
        shared = dict(config.shared_kv)
        config = replace(config, v_of_k=tuple(i for i in own if i not in shared))
    return config


def _experts(fields: Mapping[str, Any]) -> Experts | None:
    """Return the experts that layers have beside the MLP, if there are any."""
    if not read.flag(fields, "enable_moe_block"):
        return None
    return Experts(
        read.positive(fields, "num_experts"),
        read.positive(fields, "top_k_experts"),
        read.positive(fields, "moe_intermediate_size"),
        has_expert_scale=True,
        beside_mlp=True,
        names=ExpertNames(
            block="", router="router.proj", fused_gate_up="gate_up_proj", is_stacked=True
        ),
    )


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


def _layer(fields: Mapping[str, Any], kind: str, heads: tuple[int, int]) -> LayerSpec:
    num_kv_heads, head_dim = heads
    own = {"head_dim": head_dim, "per_layer_config": None}
    (layer,) = read.layers({**fields, **own}, [kind])
    return replace(layer, num_kv_heads=num_kv_heads, qk_head_dim=head_dim, v_head_dim=head_dim)


def _decoder(
    fields: Mapping[str, Any], layers: Sequence[LayerSpec], kinds: Sequence[str], **own: Any
) -> DecoderConfig:
    if fields.get("use_bidirectional_attention") == "all":
        raise ValueError("use_bidirectional_attention 'all' is unsupported")
    bias = read.flag(fields, "attention_bias")
    shape = read.shape(fields)
    shared = _shared_kv(kinds, _count(fields, "num_kv_shared_layers", 0, len(kinds)))
    sharing = dict(shared)
    inputs = None
    if fields.get("hidden_size_per_layer_input"):
        inputs = PerLayerInputs(
            read.positive(fields, "hidden_size_per_layer_input"),
            read.positive(fields, "vocab_size_per_layer_input", 262144),
        )
    return DecoderConfig(
        **shape,
        layers=tuple(LayerSpec("linear") if i in sharing else x for i, x in enumerate(layers)),
        norms=NORMS,
        qk_norm="head",
        v_norm=True,
        shared_kv=shared,
        per_layer_inputs=inputs,
        qkv_bias=bias,
        o_bias=bias,
        activation=read.activation(fields, "hidden_activation", _GELU, "gelu_pytorch_tanh"),
        attention_scale=1.0,
        logit_softcap=read.positive_number(fields, "final_logit_softcapping", None),
        embedding_scale=shape["hidden_size"] ** 0.5,
        tied_embeddings=read.flag(fields, "tie_word_embeddings", True),
        longest_text=read.longest_text(fields),
        overflows_float16=True,
        **own,
    )


def _shared_kv(kinds: Sequence[str], count: int) -> tuple[tuple[int, int], ...]:
    """Return the last `count` layers, and the layer of the same kind whose K and V each reads."""
    first = len(kinds) - count
    last = {kind: layer for layer, kind in enumerate(kinds[:first])}
    missing = set(kinds[first:]) - set(last)
    if missing:
        names = " or ".join(sorted(missing))
        raise ValueError(
            f"num_kv_shared_layers ({count}) leaves no layer of kind {names} whose K and V the "
            "others could read"
        )
    return tuple((layer, last[kinds[layer]]) for layer in range(first, len(kinds)))


def _count(fields: Mapping[str, Any], name: str, default: int, largest: int) -> int:
    value = fields.get(name)
    value = default if value is None else value
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= largest:
        raise ValueError(f"{name} must be an integer from 0 to {largest}, got {value!r}")
    return value
