# SPDX-License-Identifier: Apache-2.0
"""`Tensors`: what a source of weights offers."""

from __future__ import annotations

from pathlib import Path
from typing import Protocol

import numpy as np

from ..formats.weight_formats import QuantizedRows, WeightFormat


class Tensors(Protocol):
    """Named tensors, read one at a time."""

    @property
    def path(self) -> Path:
        """Where they are, for errors."""

    def names(self) -> list[str]:
        """Return the names of all tensors, which are those of Hugging Face checkpoints."""

    def read(
        self, name: str, shape: tuple[int, ...], expert: tuple[int, int] | None = None
    ) -> np.ndarray:
        """Return a tensor; raise a ValueError if it is missing or has another shape or type.

        With ``expert = (i, n)``, the tensor has n of this shape, of which the i-th is returned.
        """

    def format(self, name: str) -> WeightFormat | str | None:
        """Return the format of a quantized tensor, or the name of its type if it has none.

        None: it has floating-point numbers, or is missing.
        """

    def read_quantized(
        self, name: str, shape: tuple[int, ...], expert: tuple[int, int] | None = None
    ) -> QuantizedRows:
        """Return a matrix that has a `WeightFormat`; raise a ValueError as `read` does."""
