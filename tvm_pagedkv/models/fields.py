# SPDX-License-Identifier: Apache-2.0
"""Readers for the fields of a Hugging Face ``config.json`` that several families share.

Every reader checks what it takes; an error names the field, what was expected and what came.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from ..config import ROPE_TYPES, LayerSpec, RopeConfig

# What transformers calls the two kinds of layers.
FULL, SLIDING = "full_attention", "sliding_attention"


def positive(fields: Mapping[str, Any], name: str, default: int | None = None) -> int:
    """A positive integer."""
    value = fields.get(name)
    value = default if value is None else value
    if isinstance(value, bool) or not isinstance(value, int) or value <= 0:
        raise ValueError(f"{name} must be a positive integer, got {value!r}")
    return value


def not_negative(fields: Mapping[str, Any], name: str, default: int) -> int:
    """An integer from 0 on."""
    value = fields.get(name, default)
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise ValueError(f"{name} must be an integer from 0 on, got {value!r}")
    return value


def positive_number(fields: Mapping[str, Any], name: str, default: float | None) -> float | None:
    """A positive number; a field that is null or absent is the default, which may be None."""
    value = fields.get(name)
    if value is None:
        return default
    if isinstance(value, bool) or not isinstance(value, int | float) or not value > 0:
        raise ValueError(f"{name} must be a positive number, got {value!r}")
    return float(value)


def factors(fields: Mapping[str, Any], name: str, count: int) -> list[float]:
    """A list of numbers; ones where it is null or absent."""
    values = fields.get(name)
    if values is None:
        return [1.0] * count
    is_number = [isinstance(x, int | float) and not isinstance(x, bool) for x in values]
    if len(values) != count or not all(is_number):
        raise ValueError(f"{name} must be {count} numbers, got {values!r}")
    return [float(value) for value in values]


def numbers(
    fields: Mapping[str, Any], name: str, count: int, default: float | None = None
) -> list[Any]:
    """A number for each of `count` layers; the file may have one for all."""
    value = fields.get(name)
    values = default if value is None else value
    values = values if isinstance(values, list) else [values] * count
    is_number = [isinstance(x, int | float) and not isinstance(x, bool) for x in values]
    if len(values) != count or not all(is_number):
        raise ValueError(f"{name} must be a number or {count} of them, got {value!r}")
    return values


def flag(fields: Mapping[str, Any], name: str, default: bool = False) -> bool:
    """True or false."""
    value = fields.get(name)
    value = default if value is None else value
    if not isinstance(value, bool):
        raise ValueError(f"{name} must be true or false, got {value!r}")
    return value


def activation(fields: Mapping[str, Any], name: str, known: Mapping[str, str], default: str) -> str:
    """What `DecoderConfig` calls the activation that the field names."""
    value = fields.get(name) or default
    if value not in known:
        expected = " or ".join(repr(each) for each in known)
        raise ValueError(f"{name} {value!r} is not supported; expected {expected}")
    return known[value]


def flags(fields: Mapping[str, Any], name: str, default: Sequence[bool]) -> list[bool]:
    """True or false, or 1 or 0, for each layer; files may list more layers than there are."""
    values = fields.get(name)
    if values is None:
        return list(default)
    if not isinstance(values, list) or len(values) < len(default) or not set(values) <= {0, 1}:
        raise ValueError(f"{name} must list 0 or 1 for {len(default)} layers, got {values!r}")
    return [bool(value) for value in values[: len(default)]]


def silu(fields: Mapping[str, Any]) -> str:
    """The activation of the families that have SwiGLU."""
    return activation(fields, "hidden_act", {"silu": "silu", "swish": "silu"}, "silu")


def shape(fields: Mapping[str, Any]) -> dict[str, Any]:
    """The dimensions of a dense decoder, and what else is spelled alike in all families."""
    hidden_size = positive(fields, "hidden_size")
    num_heads = positive(fields, "num_attention_heads")
    return {
        "vocab_size": positive(fields, "vocab_size"),
        "hidden_size": hidden_size,
        "intermediate_size": positive(fields, "intermediate_size"),
        "num_heads": num_heads,
        "num_kv_heads": positive(fields, "num_key_value_heads", num_heads),
        "head_dim": positive(fields, "head_dim", hidden_size // num_heads),
        "context_length": positive(fields, "max_position_embeddings", 2048),
        "norm_eps": positive_number(fields, "rms_norm_eps", 1e-6),
    }


def text_model(fields: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of the text model of one with an encoder of pictures, an object of their own."""
    text = fields.get("text_config")
    if not isinstance(text, Mapping):
        raise ValueError(f"text_config must be an object, got {text!r}")
    return {"tie_word_embeddings": fields.get("tie_word_embeddings"), **text}


def token_ids(name: str, value: Any) -> tuple[int, ...]:
    """The ids of a field that holds one, a list of them, or null."""
    ids = value if isinstance(value, list) else [] if value is None else [value]
    for each in ids:
        if isinstance(each, bool) or not isinstance(each, int) or each < 0:
            raise ValueError(f"{name} must be a token id or a list of them, got {value!r}")
    return tuple(ids)


# --- layers -------------------------------------------------------------------------------------


def layer_kinds(
    fields: Mapping[str, Any], default: Sequence[str], known: Sequence[str] = (FULL, SLIDING)
) -> list[str]:
    """The kind of each layer: ``layer_types``, or the family's default where it is absent."""
    kinds = fields.get("layer_types")
    if kinds is None:
        return list(default)
    if not isinstance(kinds, list) or len(kinds) != len(default):
        raise ValueError(f"layer_types must list {len(default)} layers, got {kinds!r}")
    for kind in kinds:
        if kind not in known:
            expected = " and ".join(map(repr, known))
            raise ValueError(f"layer_types must be of {expected}, got {kind!r}")
    return kinds


def layers(
    fields: Mapping[str, Any], kinds: Sequence[str], states: Mapping[str, LayerSpec] | None = None
) -> tuple[LayerSpec, ...]:
    """One `LayerSpec` for each of `kinds`, with its window and its rotation, or one of `states`."""
    specs = dict(states or {})
    for kind in dict.fromkeys(kinds):
        if kind in specs:
            continue
        rotation = rope(fields, kind)
        if kind == SLIDING:
            window = positive(fields, "sliding_window")
            specs[kind] = LayerSpec("mha_sliding", window, rope=rotation)
        else:
            specs[kind] = LayerSpec(rope=rotation)
    return tuple(specs[kind] for kind in kinds)


def with_rope_where(layers: Sequence[LayerSpec], rotates: Sequence[bool]) -> tuple[LayerSpec, ...]:
    """The layers, without a rotation in those for which `rotates` is false."""
    plain = RopeConfig(mode="none")
    return tuple(
        layer if is_rotated else replace(layer, rope=plain)
        for layer, is_rotated in zip(layers, rotates, strict=True)
    )


# --- rotation -----------------------------------------------------------------------------------


def rope_fields(fields: Mapping[str, Any], kind: str = FULL) -> dict[str, Any]:
    """What the file says about the rotation of the layers of a kind.

    Newer files say it all in ``rope_parameters``, for each kind of layer where these differ; older
    ones in ``rope_scaling`` and other fields.
    """
    name = "rope_parameters" if fields.get("rope_parameters") else "rope_scaling"
    found = fields.get(name) or {}
    if not isinstance(found, Mapping):
        raise ValueError(f"{name} must be an object, got {found!r}")
    if any(isinstance(value, Mapping) for value in found.values()):
        found = found.get(kind)
        if not isinstance(found, Mapping):
            raise ValueError(f"{name} has no object for the layers of kind {kind!r}")
    return {name: value for name, value in found.items() if value is not None}


def with_rotations(
    fields: Mapping[str, Any], *, full: float | None, sliding: float | None
) -> dict[str, Any]:
    """The fields with a rotation for each kind of layer, as newer files have them.

    Older files have at most a base for each kind, `full` and `sliding`, and a scaling that is for
    layers without a window alone.
    """
    given = fields.get("rope_parameters") or {}
    rotations = {
        FULL: {"rope_theta": full, **rope_fields(fields, FULL)},
        SLIDING: {"rope_theta": sliding},
    }
    if SLIDING in given:
        rotations[SLIDING] |= rope_fields(fields, SLIDING)
    return {**fields, "rope_parameters": rotations}


def rope(fields: Mapping[str, Any], kind: str) -> RopeConfig:
    """The rotation of the layers of a kind."""
    scaling = rope_fields(fields, kind)
    theta = scaling.pop("rope_theta", None) or fields.get("rope_theta") or 10000.0
    rope_type = rope_type_of(scaling)
    partial: float | None = 1.0
    if rope_type != "proportional":  # there it is the share of frequencies that turn
        partial = scaling.pop("partial_rotary_factor", None)
        if partial is None:
            partial = positive_number(fields, "partial_rotary_factor", 1.0)
    scaling.pop("rope_type", None), scaling.pop("type", None)
    if rope_type == "dynamic":  # within `max_position_embeddings`, which `longest_text` enforces
        rope_type, scaling = "default", {}
    if rope_type not in ROPE_TYPES:
        raise ValueError(
            f"rope type {rope_type!r} is not supported; expected {', '.join(ROPE_TYPES)} or dynamic"
        )
    if rope_type in ("yarn", "longrope"):
        length = positive(fields, "max_position_embeddings", 2048)
        original = positive(fields, "original_max_position_embeddings", length)
        original = scaling.setdefault("original_max_position_embeddings", original)
        if rope_type == "longrope":
            scaling.setdefault("factor", length / original)
    dims = shape(fields)
    return RopeConfig(
        theta=float(theta),
        rotary_dim=int(dims["head_dim"] * partial),
        scaling={"rope_type": rope_type, **scaling},
    )


def rope_type_of(scaling: Mapping[str, Any]) -> str:
    """The ``rope_type``, which older files call ``type``; "su" is an early name of longrope."""
    rope_type = scaling.get("rope_type") or scaling.get("type") or "default"
    return "longrope" if rope_type == "su" else rope_type


def longest_text(fields: Mapping[str, Any]) -> int | None:
    """Positions up to which the rotation holds, where a text must not be longer.

    The base of a dynamic rotation grows with the length of the text once this is more than
    ``max_position_embeddings``, for all of its positions. Keys in a cache were rotated when the
    text was shorter, so only texts up to that length are computed, where it is a plain rotation.
    """
    is_dynamic = rope_type_of(rope_fields(fields)) == "dynamic"
    return positive(fields, "max_position_embeddings") if is_dynamic else None
