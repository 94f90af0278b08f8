# SPDX-License-Identifier: Apache-2.0
"""The mixers of layers that keep a state: which block a layer has in place of attention."""

from __future__ import annotations

from dataclasses import replace

from tvm_pagedkv.config import LayerSpec

from ..config.decoder_config import DecoderConfig
from .gated_delta_net import GatedDeltaNet
from .kimi_delta import KimiDelta
from .mamba2_mixer import Mamba2Mixer
from .short_conv import ShortConv

Mixer = GatedDeltaNet | KimiDelta | Mamba2Mixer | ShortConv

_BY_RULE: dict[str, type[GatedDeltaNet] | type[KimiDelta] | type[Mamba2Mixer]] = {
    "gated_delta": GatedDeltaNet,
    "kda": KimiDelta,
    "mamba2": Mamba2Mixer,
}


def mixer_of(layer: LayerSpec) -> type[Mixer]:
    """Return the block of a layer that keeps no K and V; a ValueError if there is none."""
    if layer.recurrent is None:
        if layer.conv is None:
            raise ValueError(f"no block for a layer of kind {layer.kind!r}")
        return ShortConv
    rule = layer.recurrent.rule
    if rule not in _BY_RULE:
        raise ValueError(f"no block for a recurrence of rule {rule!r}")
    return _BY_RULE[rule]


def share_of(layer: LayerSpec, num_shards: int) -> LayerSpec:
    """Return what each of `num_shards` workers keeps of a layer's states and convolution.

    They divide the heads, and heads of keys if there are several: a single one is with every
    worker, who convolves it too.
    """
    state, conv = layer.recurrent, layer.conv
    if num_shards == 1 or conv is None:
        return layer
    if state is None:
        return replace(layer, conv=replace(conv, channels=conv.channels // num_shards))
    heads, key_heads = state.num_heads // num_shards, max(state.num_key_heads // num_shards, 1)
    gone = (state.num_heads - heads) * state.value_dim
    gone += 2 * (state.num_key_heads - key_heads) * state.key_dim
    return replace(
        layer,
        recurrent=replace(state, num_heads=heads, num_key_heads=key_heads),
        conv=replace(conv, channels=conv.channels - gone),
    )


def check_share(config: DecoderConfig, num_shards: int) -> None:
    """Raise a ValueError if so many workers cannot divide the layers that keep a state."""
    for layer in config.layers:
        state, counts = layer.recurrent, {}
        if state is not None:
            counts["heads of a recurrent layer"] = state.num_heads
            if state.num_key_heads > 1:
                counts["key heads of a recurrent layer"] = state.num_key_heads
        elif layer.conv is not None:
            counts["channels of a convolution"] = layer.conv.channels
        for name, count in counts.items():
            if count % num_shards:
                raise ValueError(
                    f"num_shards must divide the {name} ({count}) of the model, got {num_shards}"
                )
