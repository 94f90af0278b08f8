# SPDX-License-Identifier: Apache-2.0
"""`BuildOptions`: what a model's code depends on besides its configuration."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, replace
from typing import Any

from tvm.target import Target

from tir_kernels.spec import VectorTarget
from tvm_pagedkv.compiler import vector_target
from tvm_pagedkv.config import DTYPES, check_choice, check_int

from ..formats.weight_formats import FORMATS, WeightFormat
from .decoder_config import DecoderConfig

LayerScales = tuple[tuple[int, Any], ...]  # a layer, and its scales of K and of V


@dataclass(frozen=True)
class BuildOptions:
    """What the code of a model depends on besides its configuration."""

    dtype: str
    page_size: int
    target: Target
    sliding_window: bool = False  # whether sequences of its caches may have a window
    num_shards: int = 1  # workers that share the heads and the MLP of every layer
    layer_indptr: tuple[int, ...] = ()  # of pipeline stages, as `KVCacheConfig` has it; (): one
    stage: int = 0
    kv_dtype: str | None = None  # of the pages of its caches; None: dtype
    state_dtype: str = "float32"  # of the states of recurrent layers
    # Layers whose decode steps attend within a budget of positions, and this budget.
    budgets: tuple[tuple[int, int], ...] = ()
    kv_scales: LayerScales = ()  # static scales of layers; none: each row has its own
    formats: tuple[tuple[str, str], ...] = ()  # name of each quantized weight, and its format
    # Whether the bits of a sequence's results are the same in every batch.
    batch_invariant: bool = False

    @property
    def vector(self) -> VectorTarget:
        """SIMD traits by which the functions of the model are generated."""
        traits = vector_target(self.target)
        # Tiles multiply only where a step has many rows, and sum in another order than vectors.
        return replace(traits, has_amx=False) if self.batch_invariant else traits

    def format_of(self, name: str) -> WeightFormat | None:
        """Return the format of a weight; None: its numbers are of type `dtype`."""
        format = dict(self.formats).get(name)
        return None if format is None else FORMATS[format]

    @property
    def precision(self) -> str:
        """Return a name for what K and V depend on besides the model: types and budgets."""
        state_dtype = self.state_dtype if self.state_dtype != "float32" else ""
        parts = [repr(each) for each in (self.budgets, self.kv_scales) if each]
        if self.batch_invariant:
            parts.append("batch_invariant")
        if not self.formats and not parts and not state_dtype:
            return self.dtype
        others = "".join([repr(self.formats), *parts, state_dtype])
        return f"{self.dtype} {hashlib.sha256(others.encode()).hexdigest()[:16]}"

    def layers_of(self, config: DecoderConfig) -> range:
        """Return the layers of the stage."""
        indptr = self.layer_indptr or (0, config.num_layers)
        return range(*indptr[self.stage : self.stage + 2])

    @property
    def is_first(self) -> bool:
        """Whether the stage has the token embedding."""
        return self.stage == 0

    @property
    def is_last(self) -> bool:
        """Whether the stage computes logits."""
        return self.stage + 2 >= len(self.layer_indptr)


def check_states(config: DecoderConfig, state_dtype: str) -> None:
    """Raise a ValueError where a model has no states that could be of this type, or none at all."""
    check_choice("state_dtype", state_dtype, DTYPES)
    if state_dtype != "float32" and all(layer.recurrent is None for layer in config.cache_layers):
        raise ValueError(
            f"state_dtype {state_dtype!r} is for models with recurrent layers, and this one has "
            "none; kv_dtype is the type of K and V"
        )


def check_batch_invariant(
    config: DecoderConfig, batch_invariant: bool, attention_budget: int | None = None
) -> None:
    """Raise an error where the bits of a sequence's results would depend on its batch anyway.

    Raises
    ------
    TypeError
        If the choice is not a bool.
    ValueError
        If there is a budget, or the model has a longrope rotation.
    """
    if not isinstance(batch_invariant, bool):
        raise TypeError(f"batch_invariant must be a bool, got {batch_invariant!r}")
    if batch_invariant and attention_budget is not None:
        raise ValueError(
            "batch_invariant cannot be combined with attention_budget, which applies only in "
            "steps where every sequence has one row"
        )
    if batch_invariant and config.short_text:
        raise ValueError(
            "batch_invariant is not for models with a longrope rotation, whose factors depend on "
            "the longest text of a step"
        )


def layer_budgets(
    config: DecoderConfig, budget: int | None, page_size: int
) -> tuple[tuple[int, int], ...]:
    """Return `BuildOptions.budgets` for a budget of positions: the layers that may have one.

    These keep K and V of all positions and attend to them by themselves: layers without a window
    and without an indexer.

    Raises
    ------
    ValueError, TypeError
        If the budget is less than two pages, or there are no such layers.
    """
    if budget is None:
        return ()
    check_int("attention_budget", budget)
    if budget < 2 * page_size:
        raise ValueError(
            f"attention_budget must be at least {2 * page_size} positions, two pages; got {budget}"
        )
    layers = [layer.cache_layers[0] for layer in config.layers]
    chosen = [i for i, each in enumerate(layers) if each.kind == "mha" and not each.lists]
    if not chosen:
        raise ValueError(
            "attention_budget is for layers that keep K and V of all positions, and the model has "
            f"none; its layers are of kind {', '.join(sorted({each.kind for each in layers}))}"
        )
    return tuple((index, budget) for index in chosen)
