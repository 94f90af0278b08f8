# SPDX-License-Identifier: Apache-2.0
"""float32 operands for NEON, whose multiply-add takes a lane of a vector as an operand."""

from __future__ import annotations

from ..operands import Float32Operands
from .steps import LaneSteps


class NeonNumbers(Float32Operands):
    """`Float32Operands` for AArch64."""

    steps = LaneSteps
