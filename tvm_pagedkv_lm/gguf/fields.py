# SPDX-License-Identifier: Apache-2.0
"""The fields of ``config.json`` from the metadata of a GGUF file, for every architecture.

What GGUF leaves out because llama.cpp knows it (softmax scales and rotations of Gemma) is added.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from . import experts, gemma, latent
from .metadata import Metadata

Fields = dict[str, Any]
Read = Callable[[str], np.ndarray]  # the name of a tensor -> its values

# The frequencies of Llama 3.1 to 3.3, which GGUF files hold as factors only.
_LLAMA3: dict[str, float] = {
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
_OTHER_CONTENTS = ("adapter", "mmproj", "imatrix", "vocab")  # general.type
_LAYERS_OF_GEMMA_27B = {"gemma2": 46, "gemma3": 62}


def config_fields(metadata: Metadata, shapes: Mapping[str, tuple[int, ...]], read: Read) -> Fields:
    """Return the fields of the ``config.json`` of this model.

    Parameters
    ----------
    metadata : Metadata
    shapes : mapping
        Shape of every tensor by its name in the file.
    read : callable

    Raises
    ------
    ValueError
        If the architecture, a key or a tensor is unknown or invalid; the message names it.
    """
    architecture = metadata.architecture
    if architecture not in ARCHITECTURES:
        raise ValueError(
            f"general.architecture {architecture!r} is not supported; expected one of "
            f"{', '.join(ARCHITECTURES)}"
        )
    content = metadata.get("general.type", str, "model")
    if content in _OTHER_CONTENTS:
        raise ValueError(f"general.type {content!r}: expected the file of a model")
    name, own = ARCHITECTURES[architecture]
    fields = {"architectures": [name], **_shape(metadata, shapes)}
    fields |= own(metadata, fields, shapes, read)
    fields |= _scaling(metadata, fields, shapes, read)
    if metadata.of_model("expert_count", int, 0) and "num_experts_per_tok" not in fields:
        raise ValueError(f"{architecture}.expert_count: this architecture has no experts here")
    metadata.refuse_unread()
    return fields


def _shape(metadata: Metadata, shapes: Mapping[str, tuple[int, ...]]) -> Fields:
    """Return the dimensions, which all architectures spell alike."""
    if "token_embd.weight" not in shapes:
        raise ValueError("the file lacks the tensor token_embd.weight")
    hidden_size = metadata.of_model("embedding_length", int)
    num_heads = metadata.of_model("attention.head_count", int)
    head_dim = metadata.of_model("attention.key_length", int, hidden_size // max(num_heads, 1))
    v_dim = metadata.of_model("attention.value_length", int, head_dim)
    if v_dim != head_dim and metadata.architecture != "deepseek2":
        raise ValueError(f"{metadata.architecture}.attention.value_length must be {head_dim}")
    if not metadata.of_model("attention.causal", bool, True):
        raise ValueError(f"{metadata.architecture}.attention.causal must be true")
    rotary_dim = metadata.of_model("rope.dimension_count", int, head_dim)
    norm = "layer_norm" if metadata.architecture == "cohere2" else "layer_norm_rms"
    return {
        "vocab_size": shapes["token_embd.weight"][0],
        "hidden_size": hidden_size,
        "intermediate_size": _of_layers(metadata, "feed_forward_length"),
        "num_hidden_layers": metadata.of_model("block_count", int) - num_extra_layers(metadata),
        "num_attention_heads": num_heads,
        "num_key_value_heads": _of_layers(metadata, "attention.head_count_kv", num_heads),
        "head_dim": head_dim,
        "max_position_embeddings": metadata.of_model("context_length", int),
        "rms_norm_eps": metadata.of_model(f"attention.{norm}_epsilon", float),
        "rope_theta": metadata.of_model("rope.freq_base", float, 10000.0),
        "partial_rotary_factor": rotary_dim / max(head_dim, 1),
        "tie_word_embeddings": "output.weight" not in shapes,
    }


def _of_layers(metadata: Metadata, name: str, *default: int) -> int:
    """Return a number that all layers have; of Gemma, whose layers differ, that of the first."""
    if metadata.architecture not in ("gemma3n", "gemma4"):
        return metadata.of_model(name, int, *default)
    value = metadata.of_model(name, object, *default)
    values = value if isinstance(value, list) else [value]
    if not values or not all(type(each) is int for each in values):
        raise ValueError(f"{metadata.architecture}.{name} must be integers, got {value!r:.60}")
    return values[0]


# --- rotation -----------------------------------------------------------------------------------


def _scaling(metadata: Metadata, fields: Fields, shapes, read: Read) -> Fields:
    """Return ``rope_scaling``: of the keys, or of the tensors with factors."""
    key = f"{metadata.architecture}.rope.scaling.type"
    # Older files have a linear factor alone; 0 and 1 scale nothing.
    factor = metadata.of_model("rope.scale_linear", float, None)
    factor = metadata.of_model("rope.scaling.factor", float, factor)
    kind = metadata.get(key, str, "none" if factor is None else "linear")
    if kind == "linear" and factor in (None, 0, 1):
        kind = "none"
    original = metadata.of_model("rope.scaling.original_context_length", int, None)
    if metadata.architecture == "gemma4":
        return {}
    if "rope_freqs.weight" in shapes:
        return {"rope_scaling": _llama3(fields, read("rope_freqs.weight"))}
    if "rope_factors_long.weight" in shapes:
        scaling: Fields = {"rope_type": "longrope"}
        for name in ("long", "short"):
            scaling[f"{name}_factor"] = read(f"rope_factors_{name}.weight").tolist()
        magnitude = metadata.of_model("rope.scaling.attn_factor", float, None)
        if magnitude:
            scaling["attention_factor"] = magnitude
    elif kind in ("none", "longrope"):
        return {}
    elif kind in ("linear", "yarn"):
        if factor is None:
            raise ValueError(f"{key} {kind!r} needs {metadata.architecture}.rope.scaling.factor")
        scaling = {"rope_type": kind, "factor": factor}
        if metadata.architecture == "gpt-oss":
            scaling["truncate"] = False  # the makers' configuration, which files leave out
        magnitude = fields.pop("yarn_magnitude", None)
        if magnitude is not None:
            scaling |= {"mscale": magnitude, "mscale_all_dim": magnitude}
        for name, key in (("beta_fast", "yarn_beta_fast"), ("beta_slow", "yarn_beta_slow")):
            value = metadata.of_model(f"rope.scaling.{key}", float, None)
            if value is not None:
                scaling[name] = value
    else:
        raise ValueError(f"{key} {kind!r} is not supported; expected none, linear, yarn, longrope")
    if original is None or kind == "linear":
        return {"rope_scaling": scaling}
    length = {"original_max_position_embeddings": original}
    return {"rope_scaling": scaling | length, **length}  # Phi-3 reads the latter, OLMo 3 the former


def _llama3(fields: Fields, factors: np.ndarray) -> Fields:
    """Return the scaling of Llama 3.1 and later, after a check that `factors` are its own."""
    scaling = {"rope_type": "llama3", "factor": float(factors.max()), **_LLAMA3}
    dim = fields["head_dim"]
    inverse = fields["rope_theta"] ** -(np.arange(0, dim, 2) / dim)
    rotations = _LLAMA3["original_max_position_embeddings"] * inverse / (2 * np.pi)
    low, high = _LLAMA3["low_freq_factor"], _LLAMA3["high_freq_factor"]
    keep = np.clip((rotations - low) / (high - low), 0, 1)
    expected = 1 / (keep + (1 - keep) / float(factors.max()))
    if factors.shape != expected.shape or not np.allclose(factors, expected, rtol=1e-3):
        raise ValueError("the factors in tensor rope_freqs.weight are not those of Llama 3")
    return scaling


# --- architectures ------------------------------------------------------------------------------


def _llama(metadata: Metadata, fields: Fields, shapes, read: Read) -> Fields:
    if fields["partial_rotary_factor"] != 1:
        raise ValueError(f"llama.rope.dimension_count must be {fields['head_dim']}")
    return {
        "attention_bias": "blk.0.attn_q.bias" in shapes,
        "mlp_bias": "blk.0.ffn_gate.bias" in shapes,
        **(experts.mixtral(metadata) if metadata.of_model("expert_count", int, 0) else {}),
    }


def _plain(metadata: Metadata, fields: Fields, shapes, read: Read) -> Fields:
    return {}


def _phi3(metadata: Metadata, fields: Fields, shapes, read: Read) -> Fields:
    return {"sliding_window": metadata.of_model("attention.sliding_window", int, 0) or None}


def _gemma2(metadata: Metadata, fields: Fields, shapes, read: Read) -> Fields:
    return {
        **_gemma(metadata, fields),
        "attn_logit_softcapping": metadata.of_model("attn_logit_softcapping", float, 50.0),
        "final_logit_softcapping": metadata.of_model("final_logit_softcapping", float, 30.0),
    }


def _gemma3(metadata: Metadata, fields: Fields, shapes, read: Read) -> Fields:
    own = {
        **_gemma(metadata, fields),
        "rope_theta": metadata.of_model("rope.freq_base", float, 1e6),
        "rope_local_base_freq": metadata.of_model("rope.freq_base_swa", float, 10000.0),
        "final_logit_softcapping": metadata.of_model("final_logit_softcapping", float, 0) or None,
    }
    return {**own, **_layer_types(metadata, 6)}


def _layer_types(metadata: Metadata, default: int) -> Fields:
    """Return which layers have a window: a flag for each, or all but each nth."""
    key = "attention.sliding_window_pattern"
    if isinstance(metadata.of_model(key, object, default), list):
        has_window = metadata.of_model(key, list)
        names = ("full_attention", "sliding_attention")
        return {"layer_types": [names[bool(each)] for each in has_window]}
    return {"sliding_window_pattern": metadata.of_model(key, int, default)}


def _olmo(metadata: Metadata, fields: Fields, shapes, read: Read) -> Fields:
    """Return what OLMo 3 has beyond OLMo 2: windows, in three layers of four."""
    window = metadata.of_model("attention.sliding_window", int, 0)
    if not window:
        return {}
    windows = {"sliding_window": window, **_layer_types(metadata, 4)}
    return {"architectures": ["Olmo3ForCausalLM"], **windows}


def _cohere2(metadata: Metadata, fields: Fields, shapes, read: Read) -> Fields:
    return {
        "layer_norm_eps": fields["rms_norm_eps"],
        "logit_scale": metadata.of_model("logit_scale", float),
        "sliding_window": metadata.of_model("attention.sliding_window", int),
        **_layer_types(metadata, 4),
    }


def _exaone4(metadata: Metadata, fields: Fields, shapes, read: Read) -> Fields:
    window = metadata.of_model("attention.sliding_window", int, 0) or None
    return {"sliding_window": window, **(_layer_types(metadata, 4) if window else {})}


def _qwen3_moe(metadata: Metadata, fields: Fields, shapes, read: Read) -> Fields:
    return experts.qwen3_moe(metadata)


def _glm4_moe(metadata: Metadata, fields: Fields, shapes, read: Read) -> Fields:
    return {
        "attention_bias": "blk.0.attn_q.bias" in shapes,
        "use_qk_norm": "blk.0.attn_q_norm.weight" in shapes,
        **experts.glm4_moe(metadata),
    }


def num_extra_layers(metadata: Metadata) -> int:
    """Return the number of last layers, which predict tokens further on and are left out."""
    return metadata.of_model("nextn_predict_layers", int, 0)


def _gpt_oss(metadata: Metadata, fields: Fields, shapes, read: Read) -> Fields:
    return {
        "attention_bias": "blk.0.attn_q.bias" in shapes,
        "sliding_window": metadata.of_model("attention.sliding_window", int),
        **experts.gpt_oss(metadata),
    }


def _gemma(metadata: Metadata, fields: Fields) -> Fields:
    """Return the window and the softmax scale, which only the models of 27 B have of their own."""
    scale = metadata.of_model("attention.scale", float, 0) or None
    scalar = fields["head_dim"] if scale is None else scale**-2
    is_27b = fields["num_hidden_layers"] == _LAYERS_OF_GEMMA_27B[metadata.architecture]
    if scale is None and is_27b:
        scalar = fields["hidden_size"] / fields["num_attention_heads"]
    return {
        "sliding_window": metadata.of_model("attention.sliding_window", int),
        "query_pre_attn_scalar": scalar,
    }


# general.architecture -> the architecture of config.json, and a function for the fields of its own.
ARCHITECTURES: dict[str, tuple[str, Callable[..., Fields]]] = {
    "llama": ("LlamaForCausalLM", _llama),
    "qwen2": ("Qwen2ForCausalLM", _plain),
    "qwen3": ("Qwen3ForCausalLM", _plain),
    "gemma2": ("Gemma2ForCausalLM", _gemma2),
    "gemma3": ("Gemma3ForCausalLM", _gemma3),
    "phi3": ("Phi3ForCausalLM", _phi3),
    "olmo2": ("Olmo2ForCausalLM", _olmo),
    "smollm3": ("SmolLM3ForCausalLM", _plain),
    "cohere2": ("Cohere2ForCausalLM", _cohere2),
    "exaone4": ("Exaone4ForCausalLM", _exaone4),
    "qwen3moe": ("Qwen3MoeForCausalLM", _qwen3_moe),
    "glm4moe": ("Glm4MoeForCausalLM", _glm4_moe),
    "gpt-oss": ("GptOssForCausalLM", _gpt_oss),
    "gemma3n": ("Gemma3nForCausalLM", gemma.gemma3n),
    "gemma4": ("Gemma4ForCausalLM", gemma.gemma4),
    "deepseek2": ("DeepseekV2ForCausalLM", latent.deepseek2),
}
