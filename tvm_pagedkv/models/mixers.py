# SPDX-License-Identifier: Apache-2.0
"""The mixers of layers that keep a state: which block a layer has in place of attention."""

from __future__ import annotations

from ..config import LayerSpec
from .gated_delta_net import GatedDeltaNet
from .mamba2_mixer import Mamba2Mixer
from .short_conv import ShortConv

Mixer = GatedDeltaNet | Mamba2Mixer | ShortConv

_BY_RULE: dict[str, type[GatedDeltaNet] | type[Mamba2Mixer]] = {
    "gated_delta": GatedDeltaNet,
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
