# SPDX-License-Identifier: Apache-2.0
"""float32 operands for NEON, whose multiply-add takes a lane of a vector as an operand."""

from __future__ import annotations

from ..operands import Float32Operands
from ..simd import broadcast, shuffle


class NeonNumbers(Float32Operands):
    """`Float32Operands` for AArch64."""

    takes_lanes = True

    def fma_lane(self, total, vector, lanes: int, lane: int, b):
        """Return what `fma` does for lane `lane` of a vector of `lanes` elements."""
        return total + broadcast(shuffle([vector], [lane]), self.lanes) * b
