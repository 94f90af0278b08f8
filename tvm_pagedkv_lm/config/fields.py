# SPDX-License-Identifier: Apache-2.0
"""Readers for the fields of a Hugging Face ``config.json`` that several families share.

Every reader checks what it takes; an error names the field, what was expected and what came.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from tvm_pagedkv.config import ROPE_TYPES, LayerSpec, RopeConfig

# What transformers calls the two kinds of layers.
FULL, SLIDING = "full_attention", "sliding_attention"
_ORIGINAL = "original_max_position_embeddings"


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
    if not is_number(value) or value <= 0:
        raise ValueError(f"{name} must be a positive number, got {value!r}")
    return float(value)


def is_number(value: Any) -> bool:
    """Whether a value is a number; JSON files may have NaN and infinity, which no field means."""
    if isinstance(value, bool):
        return False
    if isinstance(value, float):
        return math.isfinite(value)
    return isinstance(value, int) and abs(value) < 2**63


def factors(fields: Mapping[str, Any], name: str, count: int) -> list[float]:
    """A list of numbers; ones where it is null or absent."""
    values = fields.get(name)
    if values is None:
        return [1.0] * count
    if len(values) != count or not all(map(is_number, values)):
        raise ValueError(f"{name} must be {count} numbers, got {values!r}")
    return [float(value) for value in values]


def numbers(
    fields: Mapping[str, Any], name: str, count: int, default: float | None = None
) -> list[Any]:
    """A number for each of `count` layers; the file may have one for all."""
    value = fields.get(name)
    values = default if value is None else value
    values = values if isinstance(values, list) else [values] * count
    if len(values) != count or not all(map(is_number, values)):
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
    """What `Mlp` calls the activation that the field names."""
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


class Shape(NamedTuple):
    """The dimensions of a dense decoder, and what else is spelled alike in all families."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    context_length: int
    norm_eps: float

    @property
    def heads(self) -> tuple[int, int, int]:
        """The first fields of `Attention`."""
        return self.num_heads, self.num_kv_heads, self.head_dim

    @property
    def model(self) -> dict[str, Any]:
        """Fields of `DecoderConfig`, by name."""
        own = self._asdict()
        del own["intermediate_size"]
        return own


def shape(fields: Mapping[str, Any]) -> Shape:
    """Read the dimensions."""
    if fields.get("per_layer_config"):
        raise ValueError("per_layer_config is supported in Gemma 4 only")
    hidden_size = positive(fields, "hidden_size")
    num_heads = positive(fields, "num_attention_heads")
    return Shape(
        vocab_size=positive(fields, "vocab_size"),
        hidden_size=hidden_size,
        intermediate_size=positive(fields, "intermediate_size"),
        num_heads=num_heads,
        num_kv_heads=positive(fields, "num_key_value_heads", num_heads),
        head_dim=positive(fields, "head_dim", hidden_size // num_heads),
        context_length=positive(fields, "max_position_embeddings", 2048),
        norm_eps=positive_number(fields, "rms_norm_eps", 1e-6) or 1e-6,
    )


def text_model(fields: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of the text model of one with an encoder of pictures, an object of their own."""
    text = fields.get("text_config")
    if not isinstance(text, Mapping):
        raise ValueError(f"text_config must be an object, got {text!r}")
    return {"tie_word_embeddings": fields.get("tie_word_embeddings"), **text}


def token_ids(name: str, value: Any) -> tuple[int, ...]:
    """The ids of a field that holds one, a list of them, or null; negative ones are of no token."""
    ids = value if isinstance(value, list) else [] if value is None else [value]
    for each in ids:
        if isinstance(each, bool) or not isinstance(each, int):
            raise ValueError(f"{name} must be a token id or a list of them, got {value!r}")
    return tuple(each for each in ids if each >= 0)


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
    fields: Mapping[str, Any],
    kinds: Sequence[str],
    states: Mapping[str, LayerSpec] | None = None,
    partial: float | None = None,
) -> tuple[LayerSpec, ...]:
    """One `LayerSpec` for each of `kinds`, with its window and its rotation, or one of `states`.

    `partial` is as for `rope`.
    """
    specs = dict(states or {})
    for kind in dict.fromkeys(kinds):
        if kind in specs:
            continue
        rotation = rope(fields, kind, partial)
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
    ones in ``rope_scaling`` and other fields. With both, ``rope_scaling`` counts.
    """
    name, found = _rope_object(fields)
    if _is_nested(found):
        own = found.get(kind)
        if not isinstance(own, Mapping):
            raise ValueError(f"{name} has no object for the layers of kind {kind!r}")
        found = own
    return {name: value for name, value in found.items() if value is not None}


def _rope_object(fields: Mapping[str, Any]) -> tuple[str, Mapping[str, Any]]:
    """The field that describes the rotation, and its name."""
    name = "rope_scaling" if fields.get("rope_scaling") else "rope_parameters"
    found = fields.get(name) or {}
    if not isinstance(found, Mapping):
        raise ValueError(f"{name} must be an object, got {found!r}")
    return name, found


def _is_nested(found: Mapping[str, Any]) -> bool:
    """Whether a description has an object for each kind of layer."""
    return any(isinstance(value, Mapping) for value in found.values())


def with_rotations(
    fields: Mapping[str, Any], *, full: float | None, sliding: float | None
) -> dict[str, Any]:
    """The fields with a rotation for each kind of layer, as newer files have them.

    Older files have at most a base for each kind, `full` and `sliding`, and a scaling that is for
    layers without a window alone.
    """
    _, given = _rope_object({"rope_parameters": fields.get("rope_parameters")})
    if given and not _is_nested(given):
        raise ValueError(f"rope_parameters must have an object for {FULL} and {SLIDING}")
    scaling = rope_fields({"rope_scaling": fields.get("rope_scaling")})
    rotations = {
        FULL: {"rope_theta": full, **(given.get(FULL) or {}), **scaling},
        SLIDING: {"rope_theta": sliding, **(given.get(SLIDING) or {})},
    }
    return {**fields, "rope_parameters": rotations, "rope_scaling": None}


def rope(fields: Mapping[str, Any], kind: str, partial: float | None = None) -> RopeConfig:
    """The rotation of the layers of a kind.

    `partial` is the share of a head that a family rotates by default. None: it always rotates whole
    heads, and a ``partial_rotary_factor``, which transformers ignores, is refused.
    """
    scaling = rope_fields(fields, kind)
    theta = scaling.pop("rope_theta", None) or fields.get("rope_theta") or 10000.0
    rope_type = rope_type_of(scaling)
    share = positive_number({**fields, **scaling}, "partial_rotary_factor", partial) or 1.0
    scaling.pop("partial_rotary_factor", None)
    if rope_type == "proportional":  # there it is the share of frequencies that turn
        scaling["partial_rotary_factor"], share = share, 1.0
    elif partial is None and share != 1:
        raise ValueError(f"partial_rotary_factor must be 1 in models of this kind, got {share}")
    scaling.pop("rope_type", None), scaling.pop("type", None)
    if rope_type == "dynamic":  # within `max_position_embeddings`, which `longest_text` enforces
        rope_type, scaling = "default", {}
    if rope_type not in ROPE_TYPES:
        raise ValueError(
            f"rope type {rope_type!r} is not supported; expected {', '.join(ROPE_TYPES)} or dynamic"
        )
    if rope_type in ("llama3", "yarn", "longrope"):
        original = scaling[_ORIGINAL] = _original_length(fields, scaling)
        if rope_type != "llama3":
            length = positive(fields, "max_position_embeddings", 2048)
            scaling.setdefault("factor", length / original)
    return RopeConfig(
        theta=float(theta),
        rotary_dim=int(shape(fields).head_dim * share),
        scaling={"rope_type": rope_type, **scaling},
    )


def rope_type_of(scaling: Mapping[str, Any]) -> str:
    """The ``rope_type``, which older files call ``type``; "su" is an early name of longrope."""
    rope_type = scaling.get("rope_type") or scaling.get("type") or "default"
    return "longrope" if rope_type == "su" else rope_type


def _original_length(fields: Mapping[str, Any], scaling: Mapping[str, Any]) -> int:
    """Length of the texts before the rotation was scaled.

    A field beside the description of the rotation precedes one within it, as in Phi-3.
    """
    original = positive(scaling, _ORIGINAL, positive(fields, "max_position_embeddings", 2048))
    _, rope_object = _rope_object(fields)
    return original if _is_nested(rope_object) else positive(fields, _ORIGINAL, original)


def query_growth(fields: Mapping[str, Any], scaling: Mapping[str, Any]) -> tuple[float, int] | None:
    """Factor and length of Q's growth, ``1 + factor * log(1 + position // length)``, if it grows.

    Models of Mistral have both in the object that describes the rotation.
    """
    factor = positive_number(scaling, "llama_4_scaling_beta", None)
    return None if factor is None else (factor, _original_length(fields, scaling))


def longest_text(fields: Mapping[str, Any]) -> int | None:
    """Positions up to which the rotation holds, where a text must not be longer.

    The base of a dynamic rotation grows with the length of the text once this is more than
    ``max_position_embeddings``, for all of its positions. Keys in a cache were rotated when the
    text was shorter, so only texts up to that length are computed, where it is a plain rotation.
    """
    is_dynamic = rope_type_of(rope_fields(fields)) == "dynamic"
    return positive(fields, "max_position_embeddings") if is_dynamic else None
