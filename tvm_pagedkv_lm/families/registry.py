# SPDX-License-Identifier: Apache-2.0
"""The configuration of a model of any family, from the files of a Hugging Face directory.

The family is found by ``architectures`` of config.json, or by ``model_type`` without it.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from tvm_pagedkv.config import DTYPES

from ..config.decoder_config import DecoderConfig
from ..config.fields import token_ids
from ..config.json_files import read_json
from ..weights.weight_files import ADAPTER, why_no_weights
from . import (
    cohere2,
    deepseek,
    deepseek_sparse,
    exaone4,
    falcon_h1,
    gemma,
    gemma3n,
    gemma4,
    glm,
    gpt_oss,
    granite,
    kimi_linear,
    lfm2,
    llama,
    llama4,
    mamba2,
    minimax,
    minimax_m3,
    olmo,
    phi,
    qwen,
    qwen3_5,
    smollm3,
)
from .family import Family, Reader

_EXPECTED_FILES = "config.json, model.safetensors (or its index and shards) and tokenizer.json"

_MODULES = (
    llama,
    qwen,
    gemma,
    gemma3n,
    gemma4,
    phi,
    olmo,
    smollm3,
    cohere2,
    exaone4,
    llama4,
    glm,
    gpt_oss,
    deepseek,
    deepseek_sparse,
    minimax,
    minimax_m3,
    qwen3_5,
    kimi_linear,
    lfm2,
    mamba2,
    falcon_h1,
    granite,
)
FAMILIES: dict[str, Family] = {
    family.architecture: family for module in _MODULES for family in module.FAMILIES
}
_BY_MODEL_TYPE = {family.model_type: family for family in FAMILIES.values()}

# Features that no family supports yet -> fields that indicate them.
_NOT_YET = {
    "other mixture-of-experts models": ("num_local_experts", "num_experts", "n_routed_experts"),
    "other models with multi-head latent attention (MLA)": ("kv_lora_rank",),
    "models with encoders of pictures or sound": ("vision_config", "audio_config"),
}


def config_from_directory(directory: str | Path) -> DecoderConfig:
    """Read ``config.json`` and ``generation_config.json``, which may name more ends of a text.

    Raises
    ------
    FileNotFoundError
        If there is no such directory, or no config.json in it.
    ValueError
        If a file is not JSON, lacks a field, or describes a model of another kind.
    """
    directory = Path(directory)
    if not directory.is_dir():
        raise FileNotFoundError(
            f"no model directory at {directory}; expected a folder with {_EXPECTED_FILES}"
        )
    file = directory / "config.json"
    if not file.is_file():
        if (directory / ADAPTER).is_file():
            raise FileNotFoundError(why_no_weights(directory))
        raise FileNotFoundError(
            f"{directory} has no config.json; expected a Hugging Face model with {_EXPECTED_FILES}"
        )
    config = _interpret(file, config_from_fields)
    file = directory / "generation_config.json"
    return _interpret(file, partial(with_eos, config)) if file.is_file() else config


def _interpret(file: Path, interpret: Reader) -> DecoderConfig:
    """Return the configuration in a file; a ValueError that names the file once."""
    fields = read_json(file)
    try:
        return interpret(fields)
    except (ValueError, TypeError) as error:
        raise ValueError(f"{file}: {error}") from None


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
    family = next((FAMILIES[name] for name in architectures if name in FAMILIES), None)
    if family is None and not architectures:
        family = _BY_MODEL_TYPE.get(str(fields.get("model_type")))
    if family is None:
        raise ValueError(_unknown(architectures, fields))
    quantization = fields.get("quantization_config")
    method = quantization.get("quant_method") if isinstance(quantization, Mapping) else None
    is_readable = bool(method) and method == family.quantization
    if quantization and not is_readable and not _quantizes_kv_only(quantization):
        raise ValueError(
            f"quantized weights ({method or 'quantization_config'}) are not supported; take the "
            "checkpoint in float32, float16 or bfloat16"
        )
    whole = _with_text_fields(fields)
    config = with_eos(family.read(fields), whole)
    return replace(config, dtype=_dtype(whole), calibrated_for=_calibrated_for(quantization))


def _quantizes_kv_only(quantization: Any) -> bool:
    """Whether a ``quantization_config`` leaves all weights as they are, but not K and V.

    Such a file has scales of K and V. Pages do not need them: each row gets a scale of its own. It
    is of compressed-tensors, or of ModelOpt with an algorithm for the cache alone.
    """
    if not isinstance(quantization, Mapping) or quantization.get("config_groups"):
        return False
    method = quantization.get("quant_method")
    has_scheme = bool(quantization.get("kv_cache_scheme"))
    if method == "modelopt":
        has_scheme = has_scheme or bool(quantization.get("kv_cache_quant_algo"))
        return has_scheme and quantization.get("quant_algo") is None
    return method == "compressed-tensors" and has_scheme


def _calibrated_for(quantization: Any) -> str | None:
    """Return the `kv_dtype` of a ``kv_cache_scheme``; None if there is none, or another one."""
    if not isinstance(quantization, Mapping):
        return None
    scheme = quantization.get("kv_cache_scheme")
    if not isinstance(scheme, Mapping):
        algorithms = {"FP8": "float8_e4m3fn", "INT8": "int8"}
        return algorithms.get(str(quantization.get("kv_cache_quant_algo")))
    types = {"float": "float8_e4m3fn", "int": "int8"}
    return types.get(str(scheme.get("type"))) if scheme.get("num_bits") == 8 else None


def _with_text_fields(fields: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the fields with those of the text model, where these are in an object of their own."""
    text = fields.get("text_config")
    if not isinstance(text, Mapping):
        return fields
    return {**text, **{name: value for name, value in fields.items() if value is not None}}


def with_eos(config: DecoderConfig, fields: Mapping[str, Any]) -> DecoderConfig:
    """Return the configuration with the ``eos_token_id`` of the fields besides its own."""
    found = token_ids("eos_token_id", fields.get("eos_token_id"))
    return replace(config, eos_token_ids=tuple(dict.fromkeys((*config.eos_token_ids, *found))))


def _dtype(fields: Mapping[str, Any]) -> str:
    """Return the type that newer files call ``dtype`` and older ones ``torch_dtype``."""
    name = "dtype" if fields.get("dtype") is not None else "torch_dtype"
    value = fields.get(name)
    if value is None or value == "auto" or value == "float64":
        return "float32"
    if value not in DTYPES:
        raise ValueError(f"{name} {value!r} is not supported; expected one of {', '.join(DTYPES)}")
    return value


def _unknown(architectures: list[str], fields: Mapping[str, Any]) -> str:
    asked = architectures[0] if architectures else fields.get("model_type") or "(none given)"
    reasons = [what for what, names in _NOT_YET.items() if any(fields.get(name) for name in names)]
    if not reasons and any(word in str(asked).lower() for word in ("moe", "mixtral")):
        reasons = ["other mixture-of-experts models"]
    if reasons:
        return (
            f"architecture {asked} is not supported: {' and '.join(reasons)} are not there yet; "
            f"supported: {', '.join(FAMILIES)}"
        )
    known = [*FAMILIES] if architectures else [*_BY_MODEL_TYPE]
    nearest = difflib.get_close_matches(str(asked), known, n=1)
    hint = f" (the nearest is {nearest[0]})" if nearest else ""
    return f"unknown architecture {asked}{hint}; supported: {', '.join(FAMILIES)}"
