# SPDX-License-Identifier: Apache-2.0
"""`RopeConfig`: the rotary position embedding of a cache's layers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from .._checks import check_choice, check_int, check_positive, freeze

ROPE_MODES = ("none", "normal", "inline")
ROPE_TYPES = ("default", "linear", "llama3", "yarn", "longrope", "proportional")

_REQUIRED_SCALING = {
    "default": (),
    "linear": ("factor",),
    "llama3": (
        "factor",
        "low_freq_factor",
        "high_freq_factor",
        "original_max_position_embeddings",
    ),
    "yarn": ("factor", "original_max_position_embeddings"),
    "longrope": ("short_factor", "long_factor", "original_max_position_embeddings"),
    "proportional": (),
}


@dataclass(frozen=True)
class RopeConfig:
    """Rotary position embedding of the cache's layers.

    Parameters
    ----------
    mode : {"none", "normal", "inline"}
        "none" rotates nothing and ignores all other fields. "normal" rotates Q and K before K is
        written. "inline" writes K unrotated, and rotates Q and K inside the attention kernels.
    theta : float
        The base of the frequencies.
    scale : float
        A factor on the position.
    rotary_dim : int, optional
        Number of leading dimensions of a head that are rotated, an even number; None for all.
    scaling : mapping, optional
        A Hugging Face ``rope_scaling`` / ``rope_parameters`` dictionary. Its ``rope_type`` (older
        files: ``type``) is "default", "linear", "llama3", "yarn", "longrope" or "proportional".
        With the last one, frequencies are those of a rotation of all `rotary_dim` dimensions, and
        only the first of them turn, the share ``partial_rotary_factor``.

    Raises
    ------
    ValueError, TypeError
        If a value has no kernel; the message names the field.
    """

    mode: str = "normal"
    theta: float = 10000.0
    scale: float = 1.0
    rotary_dim: int | None = None
    scaling: tuple[tuple[str, Any], ...] | None = None  # sorted pairs, to be hashable

    if TYPE_CHECKING:

        def __init__(
            self,
            mode: str = "normal",
            theta: float = 10000.0,
            scale: float = 1.0,
            rotary_dim: int | None = None,
            scaling: Mapping[str, Any] | tuple[tuple[str, Any], ...] | None = None,
        ) -> None: ...

    def __post_init__(self) -> None:
        check_choice("rope.mode", self.mode, ROPE_MODES)
        if self.mode != "none":  # models without a rotation pass -1, for example
            for name in ("theta", "scale"):
                value = check_positive(f"rope.{name}", getattr(self, name))
                object.__setattr__(self, name, value)
        if self.rotary_dim is not None:
            check_int("rope.rotary_dim", self.rotary_dim, 2)
            if self.rotary_dim % 2:
                raise ValueError(f"rope.rotary_dim must be even, got {self.rotary_dim}")
        object.__setattr__(self, "scaling", self._canonical_scaling())

    def _canonical_scaling(self) -> tuple | None:
        if self.scaling is None:
            return None
        if not isinstance(self.scaling, (Mapping, tuple)):
            raise TypeError(f"rope.scaling must be a mapping, got {self.scaling!r}")
        scaling = dict(self.scaling)
        rope_type = scaling.pop("rope_type", None) or scaling.pop("type", "default")
        scaling.pop("type", None)
        check_choice("rope.scaling['rope_type']", rope_type, ROPE_TYPES)
        missing = [key for key in _REQUIRED_SCALING[rope_type] if key not in scaling]
        if missing:
            raise ValueError(f"rope.scaling of type {rope_type!r} needs {', '.join(missing)}")
        if rope_type == "default":
            return None
        if rope_type == "proportional":
            share = scaling.setdefault("partial_rotary_factor", 1.0)
            is_number = isinstance(share, (int, float)) and not isinstance(share, bool)
            if not (is_number and 0 <= share <= 1):
                name = "rope.scaling['partial_rotary_factor']"
                raise ValueError(f"{name} must be a number from 0 to 1, got {share!r}")
        return freeze(scaling | {"rope_type": rope_type})

    def resolved(self) -> RopeConfig:
        """Return the rotation of the kernels: what mode "none" ignores has its default."""
        if self.mode != "none":
            return self
        return RopeConfig(mode="none")

    @property
    def scaling_dict(self) -> dict[str, Any]:
        """The scaling as a dictionary, which is empty if there is none."""
        return dict(self.scaling or ())
