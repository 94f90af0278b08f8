# SPDX-License-Identifier: Apache-2.0
"""Layers of a model out of its parts and of the layers of the cache."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from tvm_pagedkv.config import KV_KINDS, LayerSpec

from ..blocks.attention import Attention
from ..blocks.mixers import Mixer
from ..blocks.mlp import Mlp
from ..blocks.moe import MixtureOfExperts
from ..config.decoder_config import DecoderConfig
from ..config.expert_config import Experts
from ..config.layer import Layer
from ..config.part import LayerPart


def decoder_layers(
    attention: Attention,
    specs: Sequence[LayerSpec],
    mlp: LayerPart | Sequence[LayerPart | None] | None = None,
    *,
    mixer: Mixer | None = None,
    **same: object,
) -> tuple[Layer, ...]:
    """Return a layer of a model for each layer of the cache.

    Parameters
    ----------
    attention : Attention
    specs : sequence of LayerSpec
    mlp : LayerPart or sequence, optional
        That of all layers, or of each.
    mixer : Mixer, optional
        What layers that keep a state have in place of attention.
    **same
        Further fields, which all layers have alike.
    """
    mlps = [mlp] * len(specs) if mlp is None or isinstance(mlp, LayerPart) else mlp

    def first(spec: LayerSpec) -> dict[str, LayerPart]:
        if mixer is not None and spec.kind not in KV_KINDS:
            return {"mixer": replace(mixer, spec=spec)}
        return {"attention": replace(attention, spec=spec)}

    return tuple(
        Layer(**first(spec), mlp=each, **same)  # type: ignore[arg-type]
        for spec, each in zip(specs, mlps, strict=True)
    )


def mlps(
    mlp: Mlp, experts: Experts, num_layers: int, dense_layers: Sequence[int] = ()
) -> list[LayerPart]:
    """Return the experts of each layer, or the MLP of those without experts."""
    mixture = MixtureOfExperts(experts, mlp)
    return [mlp if i in dense_layers else mixture for i in range(num_layers)]


def with_cache_layers(config: DecoderConfig, specs: Sequence[LayerSpec]) -> DecoderConfig:
    """Return a configuration whose layers of attention have these layers of the cache."""
    layers = tuple(
        replace(layer, attention=replace(layer.attention, spec=spec))
        for layer, spec in zip(config.layers, specs, strict=True)
        if isinstance(layer.attention, Attention)
    )
    return replace(config, layers=layers)
