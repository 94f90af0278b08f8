# SPDX-License-Identifier: Apache-2.0
"""The rotations of a model's layers, from the arguments of `PagedKVCache`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tvm.relax.frontend.nn.llm.kv_cache import RopeMode

from ..config import RopeConfig


def common_ropes(
    rope_mode: RopeMode | Sequence[RopeMode],
    theta: float,
    scale: float,
    scaling: dict[str, Any] | None,
    rotary_dim: int,
    num_layers: int,
) -> list[RopeConfig]:
    """Return the rotation of each layer where these differ in their mode at most."""
    modes = list(rope_mode) if isinstance(rope_mode, Sequence) else [rope_mode] * num_layers
    if len(modes) != num_layers:
        raise ValueError(f"rope_mode has {len(modes)} entries for {num_layers} layers")
    scaling = _with_placeholder_factors(scaling, rotary_dim)
    return [
        RopeConfig(RopeMode(mode).name.lower(), theta, scale, rotary_dim, scaling) for mode in modes
    ]


def own_ropes(layer_ropes: Sequence[RopeConfig], num_layers: int) -> list[RopeConfig]:
    """Return the argument `layer_ropes` as a list, after a check."""
    ropes = list(layer_ropes)
    if len(ropes) != num_layers:
        raise ValueError(f"layer_ropes has {len(ropes)} entries for {num_layers} layers")
    for rope in ropes:
        if not isinstance(rope, RopeConfig):
            raise TypeError(f"layer_ropes must be of RopeConfig, got {rope!r}")
        if rope.scaling_dict.get("rope_type") == "longrope":
            raise ValueError("layer_ropes cannot have longrope; it is for rope_scaling alone")
    return ropes


def _with_placeholder_factors(
    rope_scaling: dict[str, Any] | None, rotary_dim: int
) -> dict[str, Any] | None:
    """Add placeholders for longrope factors, which arrive when the cache is created."""
    if not rope_scaling or rope_scaling.get("rope_type", "default") == "default":
        return None
    scaling = dict(rope_scaling)
    if scaling.get("rope_type") == "longrope":
        for key in ("short_factor", "long_factor"):
            scaling.setdefault(key, (1.0,) * (rotary_dim // 2))
    return scaling
