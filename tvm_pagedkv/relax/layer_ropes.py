# SPDX-License-Identifier: Apache-2.0
"""The rotations of a model's layers, from the arguments of `PagedKVCache`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from tvm import relax
from tvm.relax.frontend.nn.llm.kv_cache import RopeMode

from tir_kernels import kernel_names
from tir_kernels.spec import KernelSpec

from ..compiler import rope_details
from ..config import MHA_KINDS, ResolvedConfig, RopeConfig
from .releases import StringImm

# Kernels with a rotation: those that append, and with mode "inline" those that attend as well.
_APPENDING = {"split_rotary", "rope_append", "append_prefill"}
_ATTENDING = {
    "prefill", "decode", "tree_paged", "prefill_ragged", "tree", "prefill_shared",
    "prefill_sliding", "decode_sliding", "tree_paged_sliding", "prefill_ragged_sliding",
    "tree_sliding", "prefill_spans", "prefill_spans_sliding",
}  # fmt: skip


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


def base_rope(ropes: Sequence[RopeConfig], kinds: Sequence[str]) -> RopeConfig:
    """Return the rotation with which kernels are compiled that layers do not have of their own.

    It is the first one among layers with K and V: those of other kinds rotate nothing.
    """
    own = [rope for rope, kind in zip(ropes, kinds, strict=True) if kind in MHA_KINDS]
    rotations = [rope for rope in own if rope.mode != "none"]
    base = (rotations or own or list(ropes))[0]
    is_mixed = 0 < len(rotations) < len(own)
    if is_mixed and base.scaling_dict.get("rope_type") == "longrope":
        raise ValueError("longrope is for all layers: one with RopeMode.NONE cannot be beside it")
    return base


def mode_number(rope: RopeConfig) -> int:
    """Return the mode as the constructor takes it."""
    return int(RopeMode[rope.mode.upper()])


@dataclass(frozen=True)
class LayerRope:
    """A rotation of some layers, and what the constructor is told of it.

    Parameters
    ----------
    layers : tuple of int
    theta, scale : float
    details : str
        What else decides the rotation, which checkpoints compare.
    spec : KernelSpec, optional
        Of the kernels that rotate by it; None: the layers have the kernels of all layers.
    names : tuple of str
        Names of these kernels.
    """

    layers: tuple[int, ...]
    theta: float
    scale: float
    details: str
    spec: KernelSpec | None
    names: tuple[str, ...]

    def expression(self, function: Callable[[str, KernelSpec], relax.ExternFunc]) -> relax.Tuple:
        """Return the argument of the constructor; `function` makes references to kernels."""
        kernels = [
            each
            for name in self.names
            if self.spec is not None
            for each in (StringImm(name), function(name, self.spec))
        ]
        about = relax.prim_value(self.theta), relax.prim_value(self.scale)
        details = StringImm(self.details)
        return relax.Tuple([relax.ShapeExpr(self.layers), *about, details, *kernels])


def layer_ropes_of(
    config: ResolvedConfig, spec_of: Callable[[Any], KernelSpec]
) -> tuple[LayerRope, ...]:
    """Return the rotations of a configuration; the first one is that of `base_rope`.

    Parameters
    ----------
    config : ResolvedConfig
    spec_of : callable
        From a layer to the spec of its kernels.
    """
    layers_of: dict[RopeConfig, list[int]] = {}
    for index, layer in enumerate(config.layers):
        if layer.kind in MHA_KINDS and layer.rope.mode != "none":
            layers_of.setdefault(replace(layer.rope, mode="normal"), []).append(index)
    found: list[LayerRope] = []
    for rope, indices in layers_of.items():
        layers = [config.layers[index] for index in indices]
        is_inline = any(layer.rope.mode == "inline" for layer in layers)
        wanted = _APPENDING | (_ATTENDING if is_inline else set())
        specs = [spec_of(layer) for layer in layers]
        names = {name for spec in specs for name in kernel_names(spec)} & wanted
        # As for all layers, kernels with a window are built from the spec of those without.
        own = next((spec for spec in specs if spec.kind == "mha"), specs[0])
        found.append(
            LayerRope(
                layers=tuple(indices),
                theta=rope.theta,
                scale=rope.scale,
                details=rope_details(layers[0]),
                spec=own if found else None,
                names=tuple(sorted(names)) if found else (),
            )
        )
    return tuple(found)


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
