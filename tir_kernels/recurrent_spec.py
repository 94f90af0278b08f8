# SPDX-License-Identifier: Apache-2.0
"""Specs of recurrent layers: what a rule of linear attention keeps, and how a token updates it."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import NamedTuple

from .define import ACCESS_BYTES
from .spec import FLOAT_DTYPES, ITEMSIZE, GpuTarget, KernelSpec, VectorTarget, row_copies

# rule -> (decay is per key channel, writes what v differs from what the state already says of k)
RULES = {
    "gated_delta": (False, True),
    "kda": (True, True),
    "mamba2": (False, False),
    "lightning": (False, False),
}


class Section(NamedTuple):
    """The elements of a row of ingredients that are of one kind.

    Attributes
    ----------
    begin : int
        The first byte in the row, a multiple of 16.
    shape : tuple of int
    dtype : str
    """

    begin: int
    shape: tuple[int, ...]
    dtype: str

    @property
    def end(self) -> int:
        """The byte behind the last one."""
        return self.begin + math.prod(self.shape) * ITEMSIZE[self.dtype]


@dataclass(frozen=True)
class RecurrentSpec:
    """Everything that decides the code of the kernels of one set of recurrent layers.

    The state S of a head is a matrix ``[key_dim, value_dim]``. A token with key k, value v, query q
    and log decay g makes it ``exp(g) * S + k (x) u`` and reads ``o = scale * S^T q``, where u is v,
    or with a delta rule ``beta * (v - (exp(g) * S)^T k)``. A state of a narrower type than float32
    is rounded after each token, before the query reads it.

    What the recurrence takes of a token besides q, its *ingredients*, is kept as K and V are: a row
    in pages ``[num_pages, page_size, row_width]`` of `dtype`, which `sections` describes.

    Parameters
    ----------
    rule : {"gated_delta", "kda", "mamba2", "lightning"}
        gated_delta: Qwen3-Next, Qwen3.5 (Yang et al., 2024); kda: Kimi Linear, whose decay has a
        value for each key channel. Without a delta rule: mamba2, where k is B, q is C and v is
        ``dt * x`` (Dao and Gu, 2024), and lightning, whose decay is a constant of the head.
    num_heads, num_key_heads : int
        Heads of v, which have a state each, and of q and k, which consecutive ones of them share.
    key_dim, value_dim : int
        Widths of k and q, and of v and o.
    dtype : str
        Type of q, k, v and o. Gates are float32.
    page_size : int
        Slots of a page of ingredients.
    target : VectorTarget or GpuTarget
        Traits of the CPU or the GPU.
    state_dtype : str
        Type of the states.

    Raises
    ------
    ValueError
        If a value is out of range.
    """

    rule: str
    num_heads: int
    num_key_heads: int
    key_dim: int
    value_dim: int
    dtype: str = "float32"
    page_size: int = 16
    target: VectorTarget | GpuTarget = field(default_factory=VectorTarget)
    state_dtype: str = "float32"

    gate_dtype = "float32"

    def __post_init__(self):
        if self.rule not in RULES:
            raise ValueError(f"no rule {self.rule!r}; there are {', '.join(RULES)}")
        for name in ("dtype", "state_dtype"):
            if getattr(self, name) not in FLOAT_DTYPES:
                raise ValueError(
                    f"{name} must be one of {', '.join(FLOAT_DTYPES)}, got {getattr(self, name)!r}"
                )
        for name in (
            "num_heads", "num_key_heads", "key_dim", "value_dim", "page_size"
        ):  # fmt: skip
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be positive, got {getattr(self, name)}")
        if self.num_heads % self.num_key_heads:
            raise ValueError(
                f"num_heads must be a multiple of num_key_heads, got {self.num_heads} and "
                f"{self.num_key_heads}"
            )

    @property
    def decays_by_channel(self) -> bool:
        """Whether g has a value for each key channel, not one for a head."""
        return RULES[self.rule][0]

    @property
    def is_delta(self) -> bool:
        """Whether a token replaces what the state says of its key."""
        return RULES[self.rule][1]

    @property
    def heads_per_key(self) -> int:
        """Heads that share k and q."""
        return self.num_heads // self.num_key_heads

    @property
    def sections(self) -> dict[str, Section]:
        """Return the sections of a row of ingredients, in order.

        "k" ``[num_key_heads, key_dim]``, "v" ``[num_heads, value_dim]``, "log_decay" float32
        ``[num_heads]`` or ``[num_heads, key_dim]``, and with a delta rule "beta" float32
        ``[num_heads]``.
        """
        gates = (self.num_heads, self.key_dim) if self.decays_by_channel else (self.num_heads,)
        shapes = {
            "k": ((self.num_key_heads, self.key_dim), self.dtype),
            "v": ((self.num_heads, self.value_dim), self.dtype),
            "log_decay": (gates, self.gate_dtype),
        }
        if self.is_delta:
            shapes["beta"] = (self.num_heads,), self.gate_dtype
        found, end = {}, 0
        for name, (shape, dtype) in shapes.items():
            found[name] = Section(_aligned(end), shape, dtype)
            end = found[name].end
        return found

    @property
    def row_width(self) -> int:
        """Elements of a row of ingredients: 16 bytes or a multiple of them."""
        *_, last = self.sections.values()
        return _aligned(last.end) // ITEMSIZE[self.dtype]

    @property
    def sizes(self) -> dict[str, int | tuple[int, ...]]:
        """Return the sizes in the shapes of arguments; a name may stand for several."""
        return {
            "H": self.num_heads,
            "Hk": self.num_key_heads,
            "Dk": self.key_dim,
            "Dv": self.value_dim,
            "gates": self.sections["log_decay"].shape,
            "page_size": self.page_size,
            "row_width": self.row_width,
        }

    @property
    def rows(self) -> KernelSpec:
        """The spec of kernels that copy rows of ingredients."""
        return row_copies(self.row_width, self.dtype, self.page_size, self.target)

    @property
    def state_shape(self) -> tuple[int, int, int]:
        """Shape of a state page, whose numbers are of `state_dtype`."""
        return self.num_heads, self.key_dim, self.value_dim

    @property
    def state_bytes(self) -> int:
        """Bytes of a state page."""
        return math.prod(self.state_shape) * ITEMSIZE[self.state_dtype]


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // ACCESS_BYTES) * ACCESS_BYTES
