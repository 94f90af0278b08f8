# SPDX-License-Identifier: Apache-2.0
"""Blocks of output features, whose sums kernels keep in registers."""

from __future__ import annotations

from tir_kernels.spec import VectorTarget


class OutputBlocks:
    """A packed layout that stores one block of output features after another."""

    out_features: int
    target: VectorTarget

    @property
    def vectors(self) -> int:
        """Vectors of float32 numbers that hold the output features of a block."""
        return 4 if self.target.registers >= 32 else 2

    @property
    def width(self) -> int:
        """Output features of a block."""
        return self.target.lanes * self.vectors

    @property
    def num_blocks(self) -> int:
        """Blocks; the last one may have output features of zeros."""
        return -(-self.out_features // self.width)
