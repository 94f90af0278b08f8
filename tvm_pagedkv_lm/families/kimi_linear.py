# SPDX-License-Identifier: Apache-2.0
"""Kimi Linear: three of four layers are delta nets with a decay for each channel, the others MLA.

Nothing is rotated: latent attention has its parts of Q and K without RoPE. Experts are chosen as in
DeepSeek V3. Files by the model's makers and by transformers have other names for the same fields.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from tvm_pagedkv.config import ConvConfig, LayerSpec, RecurrentConfig, RopeConfig

from ..blocks.kimi_delta import KimiDelta
from ..blocks.latent import LatentAttention
from ..blocks.moe import MixtureOfExperts
from ..config import fields as read
from ..config.decoder_config import DecoderConfig
from ..config.expert_config import ExpertNames, first_dense_layers
from ..config.layer import Layer
from .deepseek import with_corrected_choice
from .family import Family
from .layers import mlps

_LINEAR = "linear_attention"
# What the model's makers call the fields -> what other families call them.
_OTHER_NAMES = {
    "model_max_length": "max_position_embeddings",
    "moe_renormalize": "norm_topk_prob",
    "num_expert_group": "n_group",
    "num_experts_per_token": "num_experts_per_tok",
    "num_shared_experts": "n_shared_experts",
}
# Fields of which one value is supported.
_FIXED = {"mla_use_nope": True, "moe_layer_freq": 1, "moe_router_activation_func": "sigmoid"}


def kimi_linear(fields: Mapping[str, Any]) -> DecoderConfig:
    """Read the fields of Kimi Linear, of either spelling."""
    for name, value in _FIXED.items():
        if fields.get(name, value) != value:
            raise ValueError(f"{name} must be {value!r} in Kimi Linear, got {fields[name]!r}")
    renamed = {_OTHER_NAMES.get(name, name): value for name, value in fields.items()}
    named = {name: fields[name] for name in _OTHER_NAMES.values() if name in fields}
    defaults = {
        "max_position_embeddings": 1 << 20,
        "num_experts_per_tok": 8,
        "num_local_experts": 256,
        "moe_intermediate_size": 1024,
        "routed_scaling_factor": 2.446,
        "rms_norm_eps": 1e-5,
    }
    if any(renamed.get(name) is not None for name in ("num_experts", "n_routed_experts")):
        del defaults["num_local_experts"]
    fields = {**defaults, **renamed, **named}
    num_layers = read.positive(fields, "num_hidden_layers", 27)
    fields |= {"num_hidden_layers": num_layers, "first_k_dense_replace": 0}
    unrotated = {**fields, "rope_parameters": None, "rope_scaling": None}
    config = with_corrected_choice(
        unrotated, names=ExpertNames(block="block_sparse_moe", gate="w1", up="w3", down="w2")
    )
    latent, mixture = config.find(LatentAttention), config.find(MixtureOfExperts)
    assert latent is not None and mixture is not None
    attention = replace(
        latent,
        shape=replace(latent.shape, is_interleaved=False),
        spec=latent.shape.layer(RopeConfig(mode="none")),
    )
    mixer = KimiDelta(_delta_net(fields), "self_attn")
    of_layers = mlps(mixture.mlp, mixture.experts, num_layers, _dense_layers(renamed, num_layers))
    kinds = zip(_kinds(fields, num_layers), of_layers, strict=True)
    layers = tuple(
        Layer(mixer=mixer, mlp=mlp) if kind == _LINEAR else Layer(attention, mlp=mlp)
        for kind, mlp in kinds
    )
    return replace(config, layers=layers, has_draft_layers=False)


def _delta_net(fields: Mapping[str, Any]) -> LayerSpec:
    """Return the recurrent layers, whose fields older files have in an object of their own."""
    own = _linear_fields(fields)
    heads = "num_heads" if "num_heads" in own else "linear_num_heads"
    width = "head_dim" if "head_dim" in own else "linear_head_dim"
    taps = "short_conv_kernel_size" if "short_conv_kernel_size" in own else "linear_conv_kernel_dim"
    fields = {**fields, **own}
    num_heads, dim = read.positive(fields, heads, 32), read.positive(fields, width, 128)
    state = RecurrentConfig("kda", num_heads, num_heads, key_dim=dim, value_dim=dim)
    conv = ConvConfig(3 * num_heads * dim, read.positive(fields, taps, 4), "silu")
    return LayerSpec("recurrent", recurrent=state, conv=conv)


def _linear_fields(fields: Mapping[str, Any]) -> Mapping[str, Any]:
    own = fields.get("linear_attn_config") or {}
    if not isinstance(own, Mapping):
        raise ValueError(f"linear_attn_config must be an object, got {own!r}")
    return own


def _kinds(fields: Mapping[str, Any], num_layers: int) -> list[str]:
    """Return the kind of each layer; ``full_attn_layers`` counts from 1."""
    own = _linear_fields(fields)
    full = [i + 1 for i in range(4, num_layers, 4)]
    if "full_attn_layers" in own:
        full, linear = own["full_attn_layers"], own.get("kda_layers")
        lists = [x for x in (full, linear) if isinstance(x, list)]
        if len(lists) < 2 or sorted(sum(lists, [])) != [*range(1, num_layers + 1)]:
            raise ValueError(
                "full_attn_layers and kda_layers must list each layer from 1 to "
                f"{num_layers} once, got {full!r} and {linear!r}"
            )
    default = [read.FULL if i + 1 in full else _LINEAR for i in range(num_layers)]
    return read.layer_kinds(fields, default, (read.FULL, _LINEAR))


def _dense_layers(fields: Mapping[str, Any], num_layers: int) -> tuple[int, ...]:
    kinds = fields.get("mlp_layer_types")
    if kinds is None:
        return first_dense_layers({**fields, "num_hidden_layers": num_layers}, 1)
    if not isinstance(kinds, list) or len(kinds) != num_layers or {*kinds} - {"dense", "sparse"}:
        raise ValueError(
            f"mlp_layer_types must list dense or sparse for {num_layers} layers, got {kinds!r}"
        )
    return tuple(i for i, kind in enumerate(kinds) if kind == "dense")


FAMILIES = (Family("KimiLinearForCausalLM", "kimi_linear", kimi_linear),)
