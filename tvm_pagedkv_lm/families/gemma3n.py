# SPDX-License-Identifier: Apache-2.0
"""Gemma 3n, text: several residual streams, and layers that share K and V.

The last layers attend to the K and V of the last layer before them that has a window, or none, as
they do. Q, K and V have norms of each head, which are all that scales attention. Each layer gets
a part of a second table of embeddings. Low-rank products are beside attention, and the gates of
some MLPs are cut off.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from statistics import NormalDist
from typing import Any

from ..blocks.altup import AltUp
from ..blocks.attention import Attention
from ..blocks.mlp import Mlp
from ..blocks.per_layer import PerLayerInputs
from ..blocks.shared_kv import SharedAttention
from ..config import fields as read
from ..config.decoder_config import DecoderConfig
from ..config.layer import Layer
from ..gguf.family import GgufFamily, Header
from .family import Family
from .gemma import GGUF_TENSORS, NORMS, gelu
from .pictures import with_pictures


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
    specs = read.layers(
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
    attention = shared_attention(fields)
    activation = gelu(fields)
    mlps = [
        Mlp(width, activation, deviations=NormalDist().inv_cdf(share) if share > 0 else None)
        for width, share in zip(widths, shares, strict=True)
    ]
    layers = [
        Layer(replace(attention, spec=spec), mlp=mlp, streams=altup)
        for spec, mlp in zip(specs, mlps, strict=True)
    ]
    return shared_decoder(fields, layers, kinds)


# --- what Gemma 3n and Gemma 4 share -------------------------------------------------------------


def shared_attention(fields: Mapping[str, Any]) -> Attention:
    """Return the attention of layers with the default heads."""
    bias = read.flag(fields, "attention_bias")
    heads = read.shape(fields).heads
    return Attention(*heads, scale=1.0, qk_norm="head", v_norm=True, qkv_bias=bias, o_bias=bias)


def shared_decoder(
    fields: Mapping[str, Any], layers: Sequence[Layer], kinds: Sequence[str]
) -> DecoderConfig:
    """Return a decoder whose last layers attend to K and V of others, and have inputs."""
    if fields.get("use_bidirectional_attention") == "all":
        raise ValueError("use_bidirectional_attention 'all' is unsupported")
    shape, sources = read.shape(fields), sources_of(fields, kinds)
    inputs = None
    if fields.get("hidden_size_per_layer_input"):
        inputs = PerLayerInputs(
            read.positive(fields, "hidden_size_per_layer_input"),
            read.positive(fields, "vocab_size_per_layer_input", 262144),
            gelu(fields),
        )

    def attention(index: int) -> Attention | SharedAttention:
        source = sources.get(index, index)
        own = layers[source].attention
        assert isinstance(own, Attention)
        own = replace(own, is_source=source in sources.values())
        return own if source == index else SharedAttention(source, own)

    return DecoderConfig(
        **shape.model,
        layers=tuple(
            replace(layer, attention=attention(i), norms=NORMS, inputs=inputs)
            for i, layer in enumerate(layers)
        ),
        logit_softcap=read.positive_number(fields, "final_logit_softcapping", None),
        embedding_scale=shape.hidden_size**0.5,
        tied_embeddings=read.flag(fields, "tie_word_embeddings", True),
        longest_text=read.longest_text(fields),
        overflows_float16=True,
    )


def sources_of(fields: Mapping[str, Any], kinds: Sequence[str]) -> dict[int, int]:
    """Return the last layers, and the layer of the same kind whose K and V each reads."""
    count = _count(fields, "num_kv_shared_layers", 0, len(kinds))
    first = len(kinds) - count
    last = {kind: layer for layer, kind in enumerate(kinds[:first])}
    missing = set(kinds[first:]) - set(last)
    if missing:
        names = " or ".join(sorted(missing))
        raise ValueError(
            f"num_kv_shared_layers ({count}) leaves no layer of kind {names} whose K and V the "
            "others could read"
        )
    return {layer: last[kinds[layer]] for layer in range(first, len(kinds))}


def _count(fields: Mapping[str, Any], name: str, default: int, largest: int) -> int:
    value = fields.get(name)
    value = default if value is None else value
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= largest:
        raise ValueError(f"{name} must be an integer from 0 to {largest}, got {value!r}")
    return value


# --- GGUF ---------------------------------------------------------------------------------------

GGUF_PER_LAYER_TENSORS = GGUF_TENSORS | {
    "inp_gate": "per_layer_input_gate",
    "proj": "per_layer_projection",
    "post_norm": "post_per_layer_input_norm",
}
GGUF_MODEL_TENSORS = {
    "per_layer_token_embd": "model.embed_tokens_per_layer",
    "per_layer_model_proj": "model.per_layer_model_projection",
    "per_layer_proj_norm": "model.per_layer_projection_norm",
}


def shared_gguf_fields(header: Header) -> dict[str, Any]:
    """Return the fields that Gemma 3n and Gemma 4 have."""
    has_window = header.key("attention.sliding_window_pattern", list)
    width = header.key("embedding_length_per_layer_input", int)
    own = {
        "sliding_window": header.key("attention.sliding_window", int),
        "layer_types": [read.SLIDING if each else read.FULL for each in has_window],
        "num_kv_shared_layers": header.key("attention.shared_kv_layers", int),
        "hidden_size_per_layer_input": width,
        "final_logit_softcapping": header.key("final_logit_softcapping", float, 0) or None,
    }
    if width:
        own["vocab_size_per_layer_input"] = header.extent("per_layer_token_embd.weight")
    return own


def _gguf_fields(header: Header) -> dict[str, Any]:
    shares = header.key("activation_sparsity_scale", list)
    return {
        **shared_gguf_fields(header),
        "intermediate_size": header.key("feed_forward_length", object),
        "rope_local_base_freq": header.key("rope.freq_base_swa", float, 1e4),
        "altup_active_idx": header.key("altup.active_idx", int),
        "altup_num_inputs": header.key("altup.num_inputs", int),
        "altup_correct_scale": "blk.0.altup_correct_scale.weight" in header.shapes,
        "laurel_rank": header.extent("blk.0.laurel_l.weight"),
        # The files have how many standard deviations above the mean a gate is cut off.
        "activation_sparsity_pattern": [round(NormalDist().cdf(x), 6) for x in shares],
    }


_GGUF = GgufFamily(
    "gemma3n",
    _gguf_fields,
    layer_tensors=GGUF_PER_LAYER_TENSORS
    | {
        "altup_correct_coef": "altup.correction_coefs",
        "altup_predict_coef": "altup.prediction_coefs",
        "altup_router": "altup.modality_router",
        "altup_router_norm": "altup.router_norm",
        "laurel_l": "laurel.linear_left",
        "laurel_r": "laurel.linear_right",
        "laurel_post_norm": "laurel.post_laurel_norm",
    },
    model_tensors=GGUF_MODEL_TENSORS,
    whole_names={"altup_correct_scale.weight": "altup.correct_output_scale"},
    stacked={
        "altup_proj.weight": "model.altup_projections",
        "altup_unembd_proj.weight": "model.altup_unembed_projections",
    },
    layers_differ=True,
)

FAMILIES = (
    Family("Gemma3nForCausalLM", "gemma3n_text", gemma3n, _GGUF),
    Family("Gemma3nForConditionalGeneration", "gemma3n", with_pictures(gemma3n_text=gemma3n)),
)
