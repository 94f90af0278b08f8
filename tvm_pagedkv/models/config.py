# SPDX-License-Identifier: Apache-2.0
"""What a Hugging Face ``config.json`` says about a decoder of the Llama family, checked once."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..rope_config import ROPE_TYPES, RopeConfig

ARCHITECTURES = ("LlamaForCausalLM", "MistralForCausalLM")
_EXPECTED_FILES = "config.json, model.safetensors (or its index and shards) and tokenizer.json"


@dataclass(frozen=True)
class LlamaConfig:
    """The shape of a decoder.

    Parameters
    ----------
    vocab_size, hidden_size, intermediate_size, num_layers : int
    num_heads, num_kv_heads, head_dim : int
        Query heads, KV heads, and the width of one.
    context_length : int
        Most positions that the model was made for.
    rms_norm_eps : float
    rope : RopeConfig
    attention_bias, mlp_bias, tied_embeddings : bool
    eos_token_ids : tuple of int
        Tokens that end a text.
    sliding_window : int, optional
        Positions that a row sees in every layer, its own included; None: all before it.
    """

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    context_length: int = 2048
    rms_norm_eps: float = 1e-6
    rope: RopeConfig = RopeConfig()
    attention_bias: bool = False
    mlp_bias: bool = False
    tied_embeddings: bool = False
    eos_token_ids: tuple[int, ...] = ()
    sliding_window: int | None = None

    @property
    def layer_kind(self) -> str:
        """The kind of the cache's layers."""
        return "mha" if self.sliding_window is None else "mha_sliding"

    @classmethod
    def from_directory(cls, directory: str | Path) -> LlamaConfig:
        """Read ``config.json``; errors say what is missing, wrong or unknown.

        Raises
        ------
        FileNotFoundError
            Where there is no such directory, or no config.json in it.
        ValueError
            Where the file is no JSON, lacks a field, or describes a model of another kind.
        """
        directory = Path(directory)
        if not directory.is_dir():
            raise FileNotFoundError(
                f"no model directory at {directory}; expected a folder with {_EXPECTED_FILES}"
            )
        file = directory / "config.json"
        if not file.is_file():
            raise FileNotFoundError(
                f"{directory} has no config.json; expected a Hugging Face model with "
                f"{_EXPECTED_FILES}"
            )
        fields = read_json(file)
        try:
            return cls.from_fields(fields)
        except (ValueError, TypeError) as error:
            raise ValueError(f"{file}: {error}") from None

    @classmethod
    def from_fields(cls, fields: Mapping[str, Any]) -> LlamaConfig:
        """Interpret the fields of a ``config.json`` of any version of transformers."""
        architectures = fields.get("architectures") or []
        if not any(name in ARCHITECTURES for name in architectures):
            raise ValueError(
                f"unknown architecture {', '.join(architectures) or '(none given)'}; supported: "
                f"{', '.join(ARCHITECTURES)}"
            )
        window = None
        if fields.get("sliding_window") is not None:
            window = _positive(fields, "sliding_window")
            if "MistralForCausalLM" not in architectures:
                raise ValueError(
                    f"sliding_window {window} is supported in MistralForCausalLM only, not in "
                    f"{', '.join(architectures)}"
                )
        activation = fields.get("hidden_act", "silu")
        if activation not in ("silu", "swish"):
            raise ValueError(f"hidden_act {activation!r} is not supported; expected 'silu'")
        hidden_size = _positive(fields, "hidden_size")
        num_heads = _positive(fields, "num_attention_heads")
        head_dim = _positive(fields, "head_dim", hidden_size // num_heads)
        eos = fields.get("eos_token_id")
        return cls(
            vocab_size=_positive(fields, "vocab_size"),
            hidden_size=hidden_size,
            intermediate_size=_positive(fields, "intermediate_size"),
            num_layers=_positive(fields, "num_hidden_layers"),
            num_heads=num_heads,
            num_kv_heads=_positive(fields, "num_key_value_heads", num_heads),
            head_dim=head_dim,
            context_length=_positive(fields, "max_position_embeddings", 2048),
            rms_norm_eps=float(fields.get("rms_norm_eps", 1e-6)),
            rope=_rope(fields, head_dim),
            attention_bias=bool(fields.get("attention_bias", False)),
            mlp_bias=bool(fields.get("mlp_bias", False)),
            tied_embeddings=bool(fields.get("tie_word_embeddings", False)),
            eos_token_ids=tuple(eos) if isinstance(eos, list) else () if eos is None else (eos,),
            sliding_window=window,
        )


def read_json(file: Path) -> dict[str, Any]:
    """The object in a JSON file; a ValueError that names the file where it is none."""
    try:
        fields = json.loads(file.read_text(encoding="utf-8"))
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{file} is not JSON: {error}") from None
    if not isinstance(fields, dict):
        raise ValueError(f"{file} holds a {type(fields).__name__}; expected a JSON object")
    return fields


def _positive(fields: Mapping[str, Any], name: str, default: int | None = None) -> int:
    value = fields.get(name)
    value = default if value is None else value
    if isinstance(value, bool) or not isinstance(value, int) or value <= 0:
        raise ValueError(f"{name} must be a positive integer, got {value!r}")
    return value


def _rope(fields: Mapping[str, Any], head_dim: int) -> RopeConfig:
    """Newer files say it all in ``rope_parameters``, older ones in two other fields."""
    name = "rope_parameters" if fields.get("rope_parameters") else "rope_scaling"
    scaling = fields.get(name) or {}
    if not isinstance(scaling, Mapping):
        raise ValueError(f"{name} must be an object, got {scaling!r}")
    scaling = dict(scaling)
    theta = scaling.pop("rope_theta", None) or fields.get("rope_theta") or 10000.0
    partial = scaling.pop("partial_rotary_factor", None) or fields.get("partial_rotary_factor", 1.0)
    scaling = {name: value for name, value in scaling.items() if value is not None}
    kind = scaling.pop("rope_type", None) or scaling.get("type", "default")
    scaling.pop("type", None)
    if kind not in ROPE_TYPES:
        raise ValueError(f"rope type {kind!r} is not supported; expected {', '.join(ROPE_TYPES)}")
    if kind == "yarn" or kind == "longrope":
        scaling.setdefault(
            "original_max_position_embeddings",
            fields.get("original_max_position_embeddings") or fields.get("max_position_embeddings"),
        )
    if kind == "longrope" and "factor" not in scaling:
        original = scaling["original_max_position_embeddings"]
        scaling["factor"] = fields["max_position_embeddings"] / original
    return RopeConfig(
        theta=float(theta),
        rotary_dim=int(head_dim * partial),
        scaling={"rope_type": kind, **scaling},
    )
