# SPDX-License-Identifier: Apache-2.0
"""`DecoderConfig`: the shape of a decoder of any family."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import TypeVar

from tvm_pagedkv.config import LayerSpec, RopeConfig

from .layer import Layer
from .part import LayerPart

AnyPart = TypeVar("AnyPart", bound=LayerPart)


@dataclass(frozen=True)
class TensorNames:
    """Names of the tensors outside of layers in checkpoints.

    Parameters
    ----------
    model : str
        What the names of the embedding, of the layers and of the final norm begin with.
    embedding, final_norm, lm_head : str
    """

    model: str = "model"
    embedding: str = "embed_tokens"
    final_norm: str = "norm"
    lm_head: str = "lm_head"


@dataclass(frozen=True)
class DecoderConfig:
    """The shape of a decoder.

    Parameters
    ----------
    vocab_size, hidden_size : int
    num_heads, num_kv_heads, head_dim : int
        Number of query heads and of KV heads, and the width of a head, of layers of the cache that
        have none of their own.
    layers : tuple of Layer
    context_length : int
        Maximum number of positions that the model was trained for.
    norm_eps : float
    norm_offset : float
        Constant that is added to the weights of all norms.
    norm_subtracts_mean : bool
        Whether the norms of layers are layer norms without a bias, not RMS norms.
    attention_softcap, logit_softcap : float, optional
        Soft-cap of the attention logits, and of the output logits.
    embedding_scale : float
        Factor on the embeddings.
    logit_scale : float
        Factor on the output logits, by which the weights of the final norm are multiplied.
    tied_embeddings : bool
    names : TensorNames
    has_draft_layers : bool
        Whether checkpoints may have further layers that predict several tokens, which are not read.
    longest_text : int, optional
        Maximum length of a text, for models whose RoPE would need K to be rotated again beyond it.
    eos_token_ids : tuple of int
        Tokens that end a text.
    dtype : {"float32", "float16", "bfloat16"}
        Type of the checkpoint. `default_dtype` decides in which type the model runs.
    overflows_float16 : bool
        Whether activations of the family are known to exceed the range of float16.
    calibrated_for : str, optional
        The ``kv_dtype`` that the static scales of K and V in the checkpoint are for, if it says so.
    """

    vocab_size: int
    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    layers: tuple[Layer, ...]
    context_length: int = 2048
    norm_eps: float = 1e-6
    norm_offset: float = 0.0
    norm_subtracts_mean: bool = False
    attention_softcap: float | None = None
    logit_softcap: float | None = None
    embedding_scale: float = 1.0
    logit_scale: float = 1.0
    tied_embeddings: bool = False
    names: TensorNames = TensorNames()
    has_draft_layers: bool = False
    longest_text: int | None = None
    eos_token_ids: tuple[int, ...] = ()
    dtype: str = "float32"
    overflows_float16: bool = False
    calibrated_for: str | None = None

    # --- parts ----------------------------------------------------------------------------------

    @property
    def num_layers(self) -> int:
        """Number of layers of the whole model."""
        return len(self.layers)

    @property
    def parts(self) -> Iterator[LayerPart]:
        """The parts of all layers."""
        return (part for layer in self.layers for part in layer.parts.values())

    def find(self, kind: type[AnyPart]) -> AnyPart | None:
        """Return the first part of a kind; None if no layer has one."""
        return next((part for part in self.parts if isinstance(part, kind)), None)

    def map(self, change: Callable[[LayerPart], LayerPart]) -> DecoderConfig:
        """Return the configuration with what `change` makes of each part of its layers."""
        return replace(self, layers=tuple(layer.map(change) for layer in self.layers))

    @property
    def is_connected(self) -> bool:
        """Whether layers need more of a step than the rows of the layer before them."""
        return any(part.is_connected for part in self.parts)

    @property
    def has_index(self) -> bool:
        """Whether layers attend to what an indexer chooses."""
        return any(layer.attention and layer.attention.index for layer in self.layers)

    # --- layers of the cache --------------------------------------------------------------------

    @property
    def cache_layers(self) -> tuple[LayerSpec, ...]:
        """Kind, window, rotation and state of each layer of the cache.

        A layer of the model has two where attention and a recurrence run side by side, in this
        order, or where index keys are kept beside attention.
        """
        return tuple(spec for layer in self.layers for spec in layer.cache_layers)

    def cache_index(self, layer: int) -> int:
        """Return the first layer of the cache that a layer of the model has."""
        return sum(len(each.cache_layers) for each in self.layers[:layer])

    @property
    def short_text(self) -> int | None:
        """For longrope, the maximum length of a text that uses the short factors; else None."""
        scaling = (self.cache_layers[0].rope or RopeConfig()).scaling_dict
        is_longrope = scaling.get("rope_type") == "longrope"
        return scaling["original_max_position_embeddings"] if is_longrope else None

    def without_cache(self) -> DecoderConfig:
        """The configuration with defaults for all that the code of the model does not depend on.

        That is what the cache does with K and V, and what the host decides about texts.
        """
        plain = DecoderConfig(self.vocab_size, 1, 1, 1, 1, ())
        names = (
            "context_length", "attention_softcap", "longest_text", "eos_token_ids", "dtype",
            "overflows_float16",
        )  # fmt: skip
        changed = {name: getattr(plain, name) for name in names}
        return replace(self.map(lambda part: part.without_cache()), **changed)
