# SPDX-License-Identifier: Apache-2.0
"""The families, by ``architectures`` of config.json, or by ``model_type`` without it."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping
from typing import Any

from .config import DecoderConfig
from .gemma import gemma2, gemma3
from .llama import llama, mistral
from .olmo import olmo2
from .phi import phi3
from .qwen import qwen2, qwen3

Reader = Callable[[Mapping[str, Any]], DecoderConfig]

# Architecture -> model_type, and the function that reads the fields as a `DecoderConfig`.
FAMILIES: dict[str, tuple[str, Reader]] = {
    "LlamaForCausalLM": ("llama", llama),
    "MistralForCausalLM": ("mistral", mistral),
    "Qwen2ForCausalLM": ("qwen2", qwen2),
    "Qwen3ForCausalLM": ("qwen3", qwen3),
    "Gemma2ForCausalLM": ("gemma2", gemma2),
    "Gemma3ForCausalLM": ("gemma3_text", gemma3),
    "Phi3ForCausalLM": ("phi3", phi3),
    "Olmo2ForCausalLM": ("olmo2", olmo2),
}
_BY_MODEL_TYPE = {model_type: reader for model_type, reader in FAMILIES.values()}

# Features that no family supports yet -> fields that indicate them.
_NOT_YET = {
    "mixture-of-experts models": ("num_local_experts", "num_experts", "n_routed_experts"),
    "models with multi-head latent attention (MLA)": ("kv_lora_rank",),
    "models with encoders of pictures or sound": ("vision_config", "audio_config"),
}


def config_from_fields(fields: Mapping[str, Any]) -> DecoderConfig:
    """Interpret the fields of a ``config.json`` of any version of transformers.

    Raises
    ------
    ValueError
        If the architecture is unknown; the message lists the known ones and the nearest.
        If a field is missing or invalid.
    """
    architectures = fields.get("architectures") or []
    if not isinstance(architectures, list) or not all(isinstance(a, str) for a in architectures):
        raise ValueError(f"architectures must be a list of names, got {architectures!r}")
    reader = next((FAMILIES[name][1] for name in architectures if name in FAMILIES), None)
    if reader is None and not architectures:
        reader = _BY_MODEL_TYPE.get(str(fields.get("model_type")))
    if reader is None:
        raise ValueError(_unknown(architectures, fields))
    quantization = fields.get("quantization_config")
    if quantization:
        method = quantization.get("quant_method") if isinstance(quantization, Mapping) else None
        raise ValueError(
            f"quantized weights ({method or 'quantization_config'}) are not supported; take the "
            "checkpoint in float32, float16 or bfloat16"
        )
    return reader(fields)


def _unknown(architectures: list[str], fields: Mapping[str, Any]) -> str:
    asked = architectures[0] if architectures else fields.get("model_type") or "(none given)"
    reasons = [what for what, names in _NOT_YET.items() if any(fields.get(name) for name in names)]
    if not reasons and any(word in str(asked).lower() for word in ("moe", "mixtral")):
        reasons = ["mixture-of-experts models"]
    if reasons:
        return (
            f"architecture {asked} is not supported: {' and '.join(reasons)} are not there yet; "
            f"supported: {', '.join(FAMILIES)}"
        )
    known = [*FAMILIES] if architectures else [*_BY_MODEL_TYPE]
    nearest = difflib.get_close_matches(str(asked), known, n=1)
    hint = f" (the nearest is {nearest[0]})" if nearest else ""
    return f"unknown architecture {asked}{hint}; supported: {', '.join(FAMILIES)}"
