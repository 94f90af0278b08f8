# SPDX-License-Identifier: Apache-2.0
"""Specs of causal convolutions, whose inputs are kept as rows of pages."""

from __future__ import annotations

from dataclasses import dataclass, field

from .spec import FLOAT_DTYPES, GpuTarget, KernelSpec, VectorTarget, row_copies

ACTIVATIONS = ("silu",)
MAX_WIDTH = 8


@dataclass(frozen=True)
class ConvSpec:
    """Everything that decides the code of the kernels of one set of causal convolutions.

    A token depends on its own row and on those of the ``width - 1`` tokens before it, in each
    channel by itself. Rows are kept in pages ``[num_pages, page_size, channels]``.

    Parameters
    ----------
    channels : int
        Elements of a row.
    width : int
        Rows that a token depends on, from 2 to 8.
    dtype : str
        Type of rows, weights and biases; sums are float32.
    activation : {"silu"}, optional
    has_bias : bool
        Whether each channel has a bias.
    page_size : int
        Slots of a page.
    target : VectorTarget or GpuTarget
        Traits of the CPU or the GPU.

    Raises
    ------
    ValueError
        If a value is out of range.
    """

    channels: int
    width: int
    dtype: str = "float32"
    activation: str | None = None
    has_bias: bool = False
    page_size: int = 16
    target: VectorTarget | GpuTarget = field(default_factory=VectorTarget)

    def __post_init__(self):
        if self.dtype not in FLOAT_DTYPES:
            raise ValueError(f"dtype must be one of {', '.join(FLOAT_DTYPES)}, got {self.dtype!r}")
        if self.activation is not None and self.activation not in ACTIVATIONS:
            raise ValueError(
                f"activation must be one of {', '.join(ACTIVATIONS)} or None, got "
                f"{self.activation!r}"
            )
        if not 2 <= self.width <= MAX_WIDTH:
            raise ValueError(f"width must be from 2 to {MAX_WIDTH}, got {self.width}")
        for name in ("channels", "page_size"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be positive, got {getattr(self, name)}")

    @property
    def sizes(self) -> dict[str, int]:
        """Return the sizes in the shapes of arguments."""
        return {"channels": self.channels, "width": self.width, "width - 1": self.width - 1}

    @property
    def rows(self) -> KernelSpec:
        """The spec of kernels that append and copy rows."""
        return row_copies(self.channels, self.dtype, self.page_size, self.target)
