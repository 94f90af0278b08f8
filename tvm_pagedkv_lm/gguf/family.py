# SPDX-License-Identifier: Apache-2.0
"""`GgufFamily`: what the GGUF files of a family of models have of their own."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from .metadata import Metadata

# Tensors of layers and their names in Hugging Face directories.
_LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_MODEL = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
}
# What several families have besides.
NORMS_AFTER = {
    "post_attention_norm": "post_attention_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}


@dataclass(frozen=True)
class Header:
    """What a family reads its fields from.

    Parameters
    ----------
    metadata : Metadata
    shapes : mapping
        Shape of every tensor by its name in the file.
    read : function
        Returns the values of a tensor by its name in the file.
    fields : dict
        The fields of ``config.json`` that all architectures spell alike.
    """

    metadata: Metadata
    shapes: Mapping[str, tuple[int, ...]]
    read: Callable[[str], np.ndarray]
    fields: dict[str, Any] = field(default_factory=dict)

    def key(self, name: str, kind: type, *default: Any) -> Any:
        """Return the value of a key below the architecture, as `Metadata.of_model`."""
        return self.metadata.of_model(name, kind, *default)

    def extent(self, tensor: str) -> int:
        """Return the number of rows of a tensor; a ValueError if the file lacks it."""
        if tensor not in self.shapes:
            raise ValueError(f"the file lacks the tensor {tensor}")
        return self.shapes[tensor][0]


def _nothing(header: Header) -> dict[str, Any]:
    """Return no fields: the family has none of its own."""
    return {}


@dataclass(frozen=True)
class GgufFamily:
    """The keys and tensors of a family's GGUF files.

    Parameters
    ----------
    architecture : str
        ``general.architecture``.
    fields : function
        Returns the family's own fields of ``config.json`` from a `Header`. ``architectures`` among
        them is that of a sibling, whose files have the same architecture. ``yarn`` are parameters
        of a scaled rotation.
    layer_tensors, model_tensors : mapping
        Names of tensors of a layer, and of others, in directories, without ``.weight`` and
        ``.bias``. They replace and extend those that most families have.
    whole_names : mapping
        Tensors of a layer whose names have another end in directories.
    stacked : mapping
        Tensors with several matrices, which directories have one by one.
    norm : {"layer_norm_rms", "layer_norm"}
        What the key of the epsilon is called after.
    norm_offset : float
        What the files add to the weights of norms.
    permutes_heads : bool
        Whether llama.cpp rotates adjacent features, and the files have Q and K permuted for it.
    layers_differ : bool
        Whether a number of heads or a width may be a list with one for each layer. The first counts
        where one is asked for.
    v_width_differs : bool
        Whether heads of V may have another width than those of K.
    """

    architecture: str
    fields: Callable[[Header], dict[str, Any]] = _nothing
    layer_tensors: Mapping[str, str] = field(default_factory=dict)
    model_tensors: Mapping[str, str] = field(default_factory=dict)
    whole_names: Mapping[str, str] = field(default_factory=dict)
    stacked: Mapping[str, str] = field(default_factory=dict)
    norm: str = "layer_norm_rms"
    norm_offset: float = 0.0
    permutes_heads: bool = False
    layers_differ: bool = False
    v_width_differs: bool = False

    def layer_tensor(self, name: str) -> str | None:
        """Return the name of a tensor of a layer in directories; None if there is no such one."""
        return {**_LAYER, **self.layer_tensors}.get(name)

    def model_tensor(self, name: str) -> str | None:
        """Return the name of a tensor outside of layers in directories; None as above."""
        return {**_MODEL, **self.model_tensors}.get(name)
