# SPDX-License-Identifier: Apache-2.0
"""OLMo 2 and 3: norms after attention and the MLP instead of before, and of all of Q and of K.

In OLMo 3, three layers of four have a window, and the scaling of the rotation is for the others.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ..blocks.attention import Attention
from ..blocks.mlp import Mlp
from ..config import fields as read
from ..config.decoder_config import DecoderConfig
from ..config.layer import Norms
from ..gguf.family import NORMS_AFTER as GGUF_NORMS_AFTER
from ..gguf.family import GgufFamily, Header
from .family import Family
from .gguf_keys import layer_types
from .layers import decoder_layers

NORMS_AFTER = Norms(
    before_attention=None,
    after_attention="post_attention_layernorm",
    before_mlp=None,
    after_mlp="post_feedforward_layernorm",
)


def olmo2(fields: Mapping[str, Any]) -> DecoderConfig:
    """Read the fields of OLMo 2."""
    return _decoder(fields, [read.FULL] * read.positive(fields, "num_hidden_layers"))


def olmo3(fields: Mapping[str, Any]) -> DecoderConfig:
    """Read the fields of OLMo 3."""
    num_layers = read.positive(fields, "num_hidden_layers")
    default = [read.SLIDING if (i + 1) % 4 else read.FULL for i in range(num_layers)]
    theta = read.positive_number(fields, "rope_theta", 5e5)
    fields = {"sliding_window": 4096, **read.with_rotations(fields, full=theta, sliding=theta)}
    return _decoder(fields, read.layer_kinds(fields, default))


def _decoder(fields: Mapping[str, Any], kinds: Sequence[str]) -> DecoderConfig:
    shape, bias = read.shape({"rms_norm_eps": 1e-5, **fields}), read.flag(fields, "attention_bias")
    attention = Attention(*shape.heads, qk_norm="projection", qkv_bias=bias, o_bias=bias)
    mlp = Mlp(shape.intermediate_size, read.silu(fields))
    return DecoderConfig(
        **shape.model,
        layers=decoder_layers(attention, read.layers(fields, kinds), mlp, norms=NORMS_AFTER),
        tied_embeddings=read.flag(fields, "tie_word_embeddings"),
        longest_text=read.longest_text(fields),
    )


def _gguf_fields(header: Header) -> dict[str, Any]:
    """Return what OLMo 3 has beyond OLMo 2: windows, in three layers of four."""
    window = header.key("attention.sliding_window", int, 0)
    if not window:
        return {}
    windows = {"sliding_window": window, **layer_types(header, 4)}
    return {"architectures": ["Olmo3ForCausalLM"], **windows}


FAMILIES = (
    Family(
        "Olmo2ForCausalLM",
        "olmo2",
        olmo2,
        GgufFamily("olmo2", _gguf_fields, layer_tensors=GGUF_NORMS_AFTER),
    ),
    Family("Olmo3ForCausalLM", "olmo3", olmo3),
)
