# SPDX-License-Identifier: Apache-2.0
"""`PackedMatrix`: the packed layout of weights of floating-point numbers.

A weight matrix is packed as blocks of output features, ``[blocks, in_features, width]``. A block is
read once, in order, for a tile of rows of activations in registers. If the CPU multiplies pairs of
bfloat16, neighbouring input features are adjacent: ``[blocks, in_features / 2, width * 2]``. The
tiles of AMX take the second operand of a product like this: a tile is 16 of these rows by 16 output
features, and its rows lie ``width`` pairs apart. So one copy of the weights serves the vectors of
decode and the tiles of prefill.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from tir_kernels.cpu.isa.matrices.amx import SIDE
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
        takes_pairs = self.target.multiplies_pairs or self.target.has_amx
        return self.dtype == "bfloat16" and takes_pairs and self.in_features % 2 == 0

    @property
    def has_tiles(self) -> bool:
        """Whether many rows are multiplied in the tiles of AMX."""
        return self.has_pairs and self.target.has_amx

    @property
    def numbers(self) -> int:
        """Input features of an operand."""
        return 2 if self.has_pairs else 1

    @property
    def depth(self) -> int:
        """Operands of an output feature; tiles take 16 at a time, and the last ones are zeros."""
        step = SIDE if self.has_tiles else 1
        return -(-self.in_features // (self.numbers * step)) * step

    @property
    def shape(self) -> tuple[int, int, int]:
        """Shape of the packed weights."""
        return self.num_blocks, self.depth, self.width * self.numbers

    def pack(self, weight: np.ndarray) -> np.ndarray:
        """Pack ``[out_features, in_features]``."""
        padded = np.zeros((self.num_blocks * self.width, self.depth * self.numbers), weight.dtype)
        padded[: len(weight), : self.in_features] = weight
        blocks = padded.reshape(self.num_blocks, self.width, -1, self.numbers)
        return np.ascontiguousarray(blocks.transpose(0, 2, 1, 3)).reshape(self.shape)

    def index(self, row, column) -> list:
        """Where an element is."""
        n = self.numbers
        return [row // self.width, column // n, row % self.width * n + column % n]
