# SPDX-License-Identifier: Apache-2.0
"""The fields of ``config.json`` from a GGUF file: what is spelled alike, and a family's own."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from ..gguf.family import GgufFamily, Header
from ..gguf.metadata import Metadata
from .registry import FAMILIES

Fields = dict[str, Any]
_BY_ARCHITECTURE = {
    family.gguf.architecture: (family.architecture, family.gguf)
    for family in FAMILIES.values()
    if family.gguf is not None
}

# The frequencies of Llama 3.1 to 3.3, which GGUF files hold as factors only.
_LLAMA3: dict[str, float] = {
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
_OTHER_CONTENTS = ("adapter", "mmproj", "imatrix", "vocab")  # general.type


def gguf_family(metadata: Metadata) -> GgufFamily:
    """Return the family of a file; a ValueError if its architecture is unknown."""
    return _find(metadata)[1]


def config_fields(
    metadata: Metadata,
    shapes: Mapping[str, tuple[int, ...]],
    read: Callable[[str], np.ndarray],
) -> Fields:
    """Return the fields of the ``config.json`` of this model.

    Parameters
    ----------
    metadata, shapes, read
        As for `Header`.

    Raises
    ------
    ValueError
        If the architecture, a key or a tensor is unknown or invalid; the message names it.
    """
    name, family = _find(metadata)
    content = metadata.get("general.type", str, "model")
    if content in _OTHER_CONTENTS:
        raise ValueError(f"general.type {content!r}: expected the file of a model")
    header = Header(metadata, shapes, read)
    fields = {"architectures": [name], **_shape(header, family)}
    fields |= family.fields(replace(header, fields=fields))
    fields |= _scaling(replace(header, fields=fields))
    if metadata.of_model("expert_count", int, 0) and "num_experts_per_tok" not in fields:
        raise ValueError(
            f"{family.architecture}.expert_count: this architecture has no experts here"
        )
    metadata.refuse_unread()
    return fields


def num_extra_layers(metadata: Metadata) -> int:
    """Return the number of last layers, which predict tokens further on and are left out."""
    return metadata.of_model("nextn_predict_layers", int, 0)


def _find(metadata: Metadata) -> tuple[str, GgufFamily]:
    """Return the family of a file, and its architecture in ``config.json``."""
    if metadata.architecture not in _BY_ARCHITECTURE:
        raise ValueError(
            f"general.architecture {metadata.architecture!r} is not supported; expected one of "
            f"{', '.join(_BY_ARCHITECTURE)}"
        )
    return _BY_ARCHITECTURE[metadata.architecture]


def _shape(header: Header, family: GgufFamily) -> Fields:
    """Return the dimensions, which all architectures spell alike."""
    vocab_size = header.extent("token_embd.weight")
    hidden_size = header.key("embedding_length", int)
    num_heads = header.key("attention.head_count", int)
    head_dim = header.key("attention.key_length", int, hidden_size // max(num_heads, 1))
    v_dim = header.key("attention.value_length", int, head_dim)
    if v_dim != head_dim and not family.v_width_differs:
        raise ValueError(f"{family.architecture}.attention.value_length must be {head_dim}")
    if not header.key("attention.causal", bool, True):
        raise ValueError(f"{family.architecture}.attention.causal must be true")
    rotary_dim = header.key("rope.dimension_count", int, head_dim)
    return {
        "vocab_size": vocab_size,
        "hidden_size": hidden_size,
        "intermediate_size": _of_layers(header, family, "feed_forward_length"),
        "num_hidden_layers": header.key("block_count", int) - num_extra_layers(header.metadata),
        "num_attention_heads": num_heads,
        "num_key_value_heads": _of_layers(header, family, "attention.head_count_kv", num_heads),
        "head_dim": head_dim,
        "max_position_embeddings": header.key("context_length", int),
        "rms_norm_eps": header.key(f"attention.{family.norm}_epsilon", float),
        "rope_theta": header.key("rope.freq_base", float, 10000.0),
        "partial_rotary_factor": rotary_dim / max(head_dim, 1),
        "tie_word_embeddings": "output.weight" not in header.shapes,
    }


def _of_layers(header: Header, family: GgufFamily, name: str, *default: int) -> int:
    """Return a number that all layers have; where layers differ, that of the first."""
    if not family.layers_differ:
        return header.key(name, int, *default)
    value = header.key(name, object, *default)
    values = value if isinstance(value, list) else [value]
    if not values or not all(type(each) is int for each in values):
        raise ValueError(f"{family.architecture}.{name} must be integers, got {value!r:.60}")
    return values[0]


# --- rotation -----------------------------------------------------------------------------------


def _scaling(header: Header) -> Fields:
    """Return ``rope_scaling``: of the keys, or of the tensors with factors."""
    metadata, fields, shapes, read = header.metadata, header.fields, header.shapes, header.read
    own = fields.pop("yarn", {})
    key = f"{metadata.architecture}.rope.scaling.type"
    # Older files have a linear factor alone; 0 and 1 scale nothing.
    factor = metadata.of_model("rope.scale_linear", float, None)
    factor = metadata.of_model("rope.scaling.factor", float, factor)
    kind = metadata.get(key, str, "none" if factor is None else "linear")
    if kind == "linear" and factor in (None, 0, 1):
        kind = "none"
    original = metadata.of_model("rope.scaling.original_context_length", int, None)
    if "rope_parameters" in fields:  # a family has described it
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
        scaling = {"rope_type": kind, "factor": factor, **own}
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
