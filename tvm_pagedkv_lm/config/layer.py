# SPDX-License-Identifier: Apache-2.0
"""`Layer`: the parts of a layer of a model."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from typing import Any

from tvm_pagedkv.config import LayerSpec

from .part import AttentionPart, LayerPart


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
class Layer:
    """A layer of a model.

    Parameters
    ----------
    attention, mixer : LayerPart, optional
        The mixer is a recurrence or a convolution. With both, they see the same rows, and their
        outputs are added.
    mlp : LayerPart, optional
        A dense MLP, or experts.
    beside_mlp : LayerPart, optional
        Experts whose output is added to that of the MLP.
    norms : Norms
    parallel_mlp : bool
        Whether the MLP sees the rows that attention sees, and both outputs are added.
    streams : LayerPart, optional
        Residual streams, of which the layer computes one.
    inputs : LayerPart, optional
        What is added to the layer's output from inputs of its own.
    has_scale : bool
        Whether the output of the layer is multiplied by a number of the checkpoint.
    """

    attention: AttentionPart | None = None
    mixer: LayerPart | None = None
    mlp: LayerPart | None = None
    beside_mlp: LayerPart | None = None
    norms: Norms = Norms()
    parallel_mlp: bool = False
    streams: LayerPart | None = None
    inputs: LayerPart | None = None
    has_scale: bool = False

    @property
    def parts(self) -> dict[str, LayerPart]:
        """The parts that the layer has, by the names of the fields."""
        found = {field.name: getattr(self, field.name) for field in fields(self)}
        return {name: part for name, part in found.items() if isinstance(part, LayerPart)}

    @property
    def cache_layers(self) -> tuple[LayerSpec, ...]:
        """The layers of the cache that belong to it."""
        return tuple(spec for part in self.parts.values() for spec in part.cache_layers)

    def map(self, change: Callable[[LayerPart], LayerPart]) -> Layer:
        """Return the layer with what `change` makes of each part."""
        changed: dict[str, Any] = {name: change(part) for name, part in self.parts.items()}
        return replace(self, **changed)
