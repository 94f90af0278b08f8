# SPDX-License-Identifier: Apache-2.0
"""EXAONE 4: norms after attention and the MLP, and of each head of Q and K.

Where layers have windows, those without one have no rotation.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..blocks.attention import Attention
from ..blocks.mlp import Mlp
from ..config import fields as read
from ..config.decoder_config import DecoderConfig
from ..gguf.family import NORMS_AFTER as GGUF_NORMS_AFTER
from ..gguf.family import GgufFamily, Header
from .family import Family
from .gguf_keys import layer_types
from .layers import decoder_layers
from .olmo import NORMS_AFTER


def exaone4(fields: Mapping[str, Any]) -> DecoderConfig:
    """Read the fields of EXAONE 4."""
    kinds = _kinds(fields)
    specs = read.layers(fields, kinds)
    if fields.get("sliding_window") is not None:
        specs = read.with_rope_where(specs, [kind == read.SLIDING for kind in kinds])
    shape = read.shape({"rms_norm_eps": 1e-5, **fields})
    attention = Attention(*shape.heads, qk_norm="head")
    mlp = Mlp(shape.intermediate_size, read.silu(fields))
    return DecoderConfig(
        **shape.model,
        layers=decoder_layers(attention, specs, mlp, norms=NORMS_AFTER),
        tied_embeddings=read.flag(fields, "tie_word_embeddings"),
        longest_text=read.longest_text(fields),
    )


def _kinds(fields: Mapping[str, Any]) -> list[str]:
    """Return the layers: a window in those with an "L" of the pattern, or in all but each nth."""
    num_layers = read.positive(fields, "num_hidden_layers")
    if fields.get("sliding_window") is None:
        return [read.FULL] * num_layers
    pattern = fields.get("sliding_window_pattern", 4)
    if isinstance(pattern, str) and pattern and set(pattern) <= {"L", "G"}:
        letters = [pattern[i % len(pattern)] for i in range(num_layers - 1)] + ["G"]
        default = [read.SLIDING if letter == "L" else read.FULL for letter in letters]
    else:
        every = read.positive(fields, "sliding_window_pattern", 4)
        default = [read.SLIDING if (i + 1) % every else read.FULL for i in range(num_layers)]
    return read.layer_kinds(fields, default)


def _gguf_fields(header: Header) -> dict[str, Any]:
    window = header.key("attention.sliding_window", int, 0) or None
    return {"sliding_window": window, **(layer_types(header, 4) if window else {})}


_GGUF = GgufFamily("exaone4", _gguf_fields, layer_tensors=GGUF_NORMS_AFTER)

FAMILIES = (Family("Exaone4ForCausalLM", "exaone4", exaone4, _GGUF),)
