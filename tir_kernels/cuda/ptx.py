# SPDX-License-Identifier: Apache-2.0
"""Instructions of the PTX ISA."""

from __future__ import annotations

from tvm.script import tirx as T


def ptx(instruction: str, *operands) -> None:
    """Emit an instruction; destinations first."""
    T.evaluate(T.ptx[instruction](*operands))
