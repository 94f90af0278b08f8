# SPDX-License-Identifier: Apache-2.0
"""The static scales of a model's layers, from the arguments of `PagedKVCache`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from ..config import MHA_KINDS, ResolvedConfig


def scales_of_layers(kinds: list[str], scales: Sequence[Any] | None, runtime: str) -> list[Any]:
    """Return the static scales of each layer; a ValueError where not all layers with K and V do."""
    if scales is None:
        return [None] * len(kinds)
    if runtime == "stock":
        raise ValueError("kv_scales need runtime 'pagedkv': pages of the stock runtime have none")
    if len(scales) != len(kinds):
        raise ValueError(f"kv_scales has {len(scales)} entries for {len(kinds)} layers")
    for kind, own in zip(kinds, scales, strict=True):
        if (own is not None) != (kind in MHA_KINDS):
            raise ValueError(
                "kv_scales are for all layers with K and V, which share kernels, and for no "
                f"others; got {own!r} for a layer of kind {kind!r}"
            )
    return list(scales)


def static_scales(config: ResolvedConfig) -> np.ndarray | None:
    """Return the scales of all layers, ones where a layer has no K and V; None: there are none."""
    found = {i: layer.kv_scales for i, layer in enumerate(config.layers) if layer.kv_scales}
    if not found:
        return None
    shape = np.shape(next(iter(found.values())))
    scales = np.ones((len(config.layers), *shape), "float32")
    for layer, own in found.items():
        scales[layer] = own
    return scales
