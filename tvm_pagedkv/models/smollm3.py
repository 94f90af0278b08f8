# SPDX-License-Identifier: Apache-2.0
"""SmolLM3: as Llama, without a rotation in every fourth layer."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from . import fields as read
from .config import DecoderConfig
from .llama import llama


def smollm3(fields: Mapping[str, Any]) -> DecoderConfig:
    """Read the fields of SmolLM3. Layers without a rotation have a window where it is on."""
    num_layers = read.positive(fields, "num_hidden_layers")
    interval = read.positive(fields, "no_rope_layer_interval", 4)
    default = [bool((i + 1) % interval) for i in range(num_layers)]
    rotates = read.flags(fields, "no_rope_layers", default)
    kinds = [read.FULL] * num_layers
    if read.flag(fields, "use_sliding_window") and fields.get("sliding_window") is not None:
        default_kinds = [read.FULL if each else read.SLIDING for each in rotates]
        kinds = read.layer_kinds(fields, default_kinds)
    plain = {"rope_theta": 2e6, "tie_word_embeddings": True, **fields, "sliding_window": None}
    layers = read.layers({**plain, "sliding_window": fields.get("sliding_window")}, kinds)
    return replace(llama(plain), layers=read.with_rope_where(layers, rotates))
