# SPDX-License-Identifier: Apache-2.0
"""`DecoderConfig`: the shape of a dense decoder of any family."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ..config import LayerSpec, RopeConfig


@dataclass(frozen=True)
class Norms:
    """Names of a layer's norms in checkpoints; None if the family does not have one.

    A norm after attention or the MLP applies before the residual is added.
    """

    before_attention: str | None = "input_layernorm"
    after_attention: str | None = None
    before_mlp: str | None = "post_attention_layernorm"
    after_mlp: str | None = None


@dataclass(frozen=True)
class DecoderConfig:
    """The shape of a decoder, and the options of its blocks.

    Parameters
    ----------
    vocab_size, hidden_size, intermediate_size : int
    num_heads, num_kv_heads, head_dim : int
        Number of query heads and of KV heads, and the width of a head.
    layers : tuple of LayerSpec
        Kind, window and rotary embedding of each layer.
    context_length : int
        Maximum number of positions that the model was trained for.
    norm_eps : float
    norms : Norms
    norm_offset : float
        Constant that is added to the weights of all norms.
    qk_norm : {"head", "projection"}, optional
        RMS norm of Q and K before the rotation: per head with shared weights, or over all heads.
    qkv_bias, o_bias, mlp_bias : bool
    activation : {"silu", "gelu_tanh"}
        Activation of the MLP's gate.
    attention_scale : float, optional
        Factor on the attention logits; None: ``head_dim ** -0.5``.
    attention_softcap, logit_softcap : float, optional
        Soft-cap of the attention logits, and of the output logits.
    embedding_scale : float
        Factor on the embeddings.
    tied_embeddings : bool
    has_fused_weights : bool
        Whether checkpoints store Q, K and V in one tensor, and gate and up in another.
    longest_text : int, optional
        Maximum length of a text, for models whose RoPE would need K to be rotated again beyond it.
    eos_token_ids : tuple of int
        Tokens that end a text.
    dtype : {"float32", "float16", "bfloat16"}
        Type of the checkpoint. `default_dtype` decides in which type the model runs.
    overflows_float16 : bool
        Whether activations of the family are known to exceed the range of float16.
    """

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    layers: tuple[LayerSpec, ...]
    context_length: int = 2048
    norm_eps: float = 1e-6
    norms: Norms = Norms()
    norm_offset: float = 0.0
    qk_norm: str | None = None
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    activation: str = "silu"
    attention_scale: float | None = None
    attention_softcap: float | None = None
    logit_softcap: float | None = None
    embedding_scale: float = 1.0
    tied_embeddings: bool = False
    has_fused_weights: bool = False
    longest_text: int | None = None
    eos_token_ids: tuple[int, ...] = ()
    dtype: str = "float32"
    overflows_float16: bool = False

    @property
    def num_layers(self) -> int:
        """Number of layers of the whole model."""
        return len(self.layers)

    @property
    def sm_scale(self) -> float:
        """Factor on the attention logits."""
        return self.head_dim**-0.5 if self.attention_scale is None else self.attention_scale

    @property
    def short_text(self) -> int | None:
        """For longrope, the maximum length of a text that uses the short factors; else None."""
        scaling = (self.layers[0].rope or RopeConfig()).scaling_dict
        is_longrope = scaling.get("rope_type") == "longrope"
        return scaling["original_max_position_embeddings"] if is_longrope else None

    def without_cache(self) -> DecoderConfig:
        """The configuration with defaults for all that the code of the model does not depend on.

        That is what the cache does with K and V, and what the host decides about texts.
        """
        layers = (LayerSpec(),) * self.num_layers
        plain = DecoderConfig(self.vocab_size, 1, 1, 1, 1, 1, layers)
        names = (
            "context_length", "attention_softcap", "longest_text", "eos_token_ids", "dtype",
            "overflows_float16",
        )  # fmt: skip
        return replace(self, layers=layers, **{name: getattr(plain, name) for name in names})


def read_json(file: Path) -> dict[str, Any]:
    """The object in a JSON file; a ValueError that names the file where it is none."""
    try:
        fields = json.loads(file.read_text(encoding="utf-8"))
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{file} is not JSON: {error}") from None
    if not isinstance(fields, dict):
        raise ValueError(f"{file} holds a {type(fields).__name__}; expected a JSON object")
    return fields
