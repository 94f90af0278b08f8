# SPDX-License-Identifier: Apache-2.0
"""`PackedMatrix`: the packed layout of weights of floating-point numbers.

A weight matrix is packed as blocks of output features, ``[blocks, in_features, width]``. A block is
read once, in order, for a tile of rows of activations in registers. If the CPU multiplies pairs of
bfloat16, neighbouring input features are adjacent: ``[blocks, in_features / 2, width * 2]``.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from tir_kernels.spec import VectorTarget

from .output_blocks import OutputBlocks


@dataclass(frozen=True)
class PackedMatrix(OutputBlocks):
    """The packed layout of a weight matrix for a target.

    Parameters
    ----------
    out_features, in_features : int
    dtype : str
    target : VectorTarget
    """

    out_features: int
    in_features: int
    dtype: str
    target: VectorTarget

    @property
    def has_pairs(self) -> bool:
        """Whether two neighbouring input features form one operand."""
        even = self.in_features % 2 == 0
        return self.dtype == "bfloat16" and self.target.multiplies_pairs and even

    @property
    def numbers(self) -> int:
        """Input features of an operand."""
        return 2 if self.has_pairs else 1

    @property
    def shape(self) -> tuple[int, int, int]:
        """Shape of the packed weights."""
        return self.num_blocks, self.in_features // self.numbers, self.width * self.numbers

    def pack(self, weight: np.ndarray) -> np.ndarray:
        """Pack ``[out_features, in_features]``."""
        padded = np.zeros((self.num_blocks * self.width, self.in_features), weight.dtype)
        padded[: len(weight)] = weight
        blocks = padded.reshape(self.num_blocks, self.width, -1, self.numbers)
        return np.ascontiguousarray(blocks.transpose(0, 2, 1, 3)).reshape(self.shape)

    def index(self, row, column) -> list:
        """Where an element is."""
        n = self.numbers
        return [row // self.width, column // n, row % self.width * n + column % n]
