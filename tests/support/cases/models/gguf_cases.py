# SPDX-License-Identifier: Apache-2.0
"""Hugging Face directories written as GGUF files, with the writer and the names of llama.cpp."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from safetensors.numpy import load_file

from tvm_pagedkv_lm.text.byte_level import byte_characters

from .gguf_experts import EXPERT_KEYS, own_name, with_stacked_experts
from .gguf_special import rope_factors, special_keys, special_tensors

ARCHITECTURES = {
    "llama": gguf.MODEL_ARCH.LLAMA,
    "qwen2": gguf.MODEL_ARCH.QWEN2,
    "qwen3": gguf.MODEL_ARCH.QWEN3,
    "gemma2": gguf.MODEL_ARCH.GEMMA2,
    "gemma3_text": gguf.MODEL_ARCH.GEMMA3,
    "phi3": gguf.MODEL_ARCH.PHI3,
    "olmo2": gguf.MODEL_ARCH.OLMO2,
    "olmo3": gguf.MODEL_ARCH.OLMO2,
    "smollm3": gguf.MODEL_ARCH.SMOLLM3,
    "cohere2": gguf.MODEL_ARCH.COHERE2,
    "exaone4": gguf.MODEL_ARCH.EXAONE4,
    "mixtral": gguf.MODEL_ARCH.LLAMA,
    "qwen3_moe": gguf.MODEL_ARCH.QWEN3MOE,
    "glm4_moe": gguf.MODEL_ARCH.GLM4_MOE,
    "gpt_oss": gguf.MODEL_ARCH.GPT_OSS,
    "gemma3n_text": gguf.MODEL_ARCH.GEMMA3N,
    "gemma4_text": gguf.MODEL_ARCH.GEMMA4,
    "deepseek_v2": gguf.MODEL_ARCH.DEEPSEEK2,
    "deepseek_v3": gguf.MODEL_ARCH.DEEPSEEK2,
}

_WITH_WINDOWS = ("gemma2", "gemma3_text", "phi3", "olmo3", "cohere2", "exaone4", "gpt_oss")


def write_gguf(
    directory: Path,
    file: Path,
    *,
    keys: dict[str, Any] | None = None,
    without: tuple[str, ...] = (),
    tensors: dict[str, np.ndarray] | None = None,
    quantization: gguf.GGMLQuantizationType = gguf.GGMLQuantizationType.F32,
    encode: Callable[[str, np.ndarray], np.ndarray] | None = None,
) -> Path:
    """Write the model of a Hugging Face directory, with a tokenizer of a byte per token.

    Parameters
    ----------
    keys : dict
        More keys, or other values for them; those that begin with "." are below the architecture.
    without : tuple of str
        Keys that are left out.
    tensors : dict
        More tensors by name.
    quantization : GGMLQuantizationType
        Type of the matrices.
    encode : callable
        From the name in the directory and the values of a matrix to its rows in this type.
    """
    fields = json.loads((directory / "config.json").read_text())
    architecture = ARCHITECTURES[fields["model_type"]]
    name = gguf.MODEL_ARCH_NAMES[architecture]
    writer = gguf.GGUFWriter(file, name)
    found = _keys(fields) | _vocabulary(fields["vocab_size"]) | (keys or {})
    for key, value in found.items():
        if key not in without:
            _add(writer, f"{name}{key}" if key.startswith(".") else key, value)
    names = gguf.get_tensor_name_map(architecture, fields["num_hidden_layers"])
    stored = special_tensors(fields, load_file(directory / "model.safetensors"))
    stored = with_stacked_experts(stored)
    if fields["model_type"] == "gemma4_text":
        tensors = {"rope_freqs.weight": rope_factors(fields), **(tensors or {})}
    for theirs, tensor in stored.items():
        kind, raw = gguf.GGMLQuantizationType.F32, tensor.astype("float32")
        if raw.ndim > 1:
            kind = quantization
            raw = gguf.quants.quantize(raw, kind) if encode is None else encode(theirs, raw)
        # Of matrices it moves whole rows, and so it may come after.
        raw = np.ascontiguousarray(_as_llama_cpp_has_it(theirs, raw, fields))
        own = own_name(theirs) or names.get_name(theirs, (".weight", ".bias"))
        own = theirs if own is None else own
        writer.add_tensor(own, raw, raw_dtype=kind)
    for own, array in (tensors or {}).items():
        writer.add_tensor(own, array)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return file


def _keys(fields: dict[str, Any]) -> dict[str, Any]:
    rope = fields.get("rope_parameters") or {}
    rope = rope.get("full_attention", rope)
    found = {
        ".context_length": fields["max_position_embeddings"],
        ".embedding_length": fields["hidden_size"],
        ".block_count": fields["num_hidden_layers"],
        ".feed_forward_length": fields["intermediate_size"],
        ".attention.head_count": fields["num_attention_heads"],
        ".attention.head_count_kv": fields["num_key_value_heads"],
        ".attention.layer_norm_rms_epsilon": fields["rms_norm_eps"],
        ".attention.key_length": fields.get("head_dim"),
        ".attention.value_length": fields.get("head_dim"),
        ".rope.freq_base": rope.get("rope_theta"),
        ".attn_logit_softcapping": fields.get("attn_logit_softcapping"),
        ".final_logit_softcapping": fields.get("final_logit_softcapping"),
    }
    if fields["model_type"] == "cohere2":
        del found[".attention.layer_norm_rms_epsilon"]
        found[".attention.layer_norm_epsilon"] = fields["layer_norm_eps"]
        found[".logit_scale"] = fields["logit_scale"]
    if fields["model_type"] in _WITH_WINDOWS:
        found[".attention.sliding_window"] = fields.get("sliding_window")
    for key, field in EXPERT_KEYS.get(fields["model_type"], {}).items():
        found[key] = fields[field] if isinstance(field, str) else field
    found |= special_keys(fields)
    return {key: value for key, value in found.items() if value is not None}


def _vocabulary(size: int) -> dict[str, Any]:
    """A byte-level BPE with one merge; tokens beyond it are unused."""
    tokens = (sorted(byte_characters()) + ['!"'] + [f"<unused{i}>" for i in range(size)])[:size]
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [1] * size,
        "tokenizer.ggml.merges": ['! "'],
        "tokenizer.ggml.eos_token_id": 2,
    }


def _add(writer: gguf.GGUFWriter, key: str, value: Any) -> None:
    add = {
        bool: writer.add_bool,
        int: writer.add_uint32,
        float: writer.add_float32,
        str: writer.add_string,
        list: writer.add_array,
    }[type(value)]
    add(key, value)


def _as_llama_cpp_has_it(name: str, tensor: np.ndarray, fields: dict[str, Any]) -> np.ndarray:
    if fields["model_type"] in ("gemma2", "gemma3_text") and name.endswith("norm.weight"):
        return tensor + 1
    if fields["model_type"] in ("llama", "mixtral", "smollm3") and (
        "q_proj" in name or "k_proj" in name
    ):
        heads = fields["num_attention_heads" if "q_proj" in name else "num_key_value_heads"]
        halves = tensor.reshape(heads, 2, -1, *tensor.shape[1:])
        return halves.swapaxes(1, 2).reshape(tensor.shape)
    return tensor
