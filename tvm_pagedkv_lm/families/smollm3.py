# SPDX-License-Identifier: Apache-2.0
"""SmolLM3: as Llama, without a rotation in every fourth layer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..config import fields as read
from ..config.decoder_config import DecoderConfig
from ..gguf.family import GgufFamily
from .family import Family
from .layers import with_cache_layers
from .llama import llama


def smollm3(fields: Mapping[str, Any]) -> DecoderConfig:
    """Read the fields of SmolLM3. Layers without a rotation have a window where it is on."""
    num_layers = read.positive(fields, "num_hidden_layers")
    interval = read.positive(fields, "no_rope_layer_interval", 4)
    default = [bool((i + 1) % interval) for i in range(num_layers)]
    rotates = read.flags(fields, "no_rope_layers", default)
    kinds = [read.FULL] * num_layers
    if fields.get("sliding_window") is not None:
        has_windows = read.flag(fields, "use_sliding_window")
        if has_windows:
            kinds = [read.FULL if each else read.SLIDING for each in rotates]
        kinds = read.layer_kinds(fields, kinds)
        if read.SLIDING in kinds and not has_windows:
            raise ValueError("layer_types has windows, which use_sliding_window disables")
    fields = {"rope_theta": 2e6, "tie_word_embeddings": True, **fields}
    specs = read.with_rope_where(read.layers(fields, kinds), rotates)
    return with_cache_layers(llama(fields), specs)


FAMILIES = (
    Family("SmolLM3ForCausalLM", "smollm3", smollm3, GgufFamily("smollm3", permutes_heads=True)),
)
