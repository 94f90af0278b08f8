# SPDX-License-Identifier: Apache-2.0
"""Instructions of the PTX ISA."""

from __future__ import annotations

from tvm.script import tirx as T

SHORT_TYPES = {"float16": "f16", "bfloat16": "bf16"}  # as instructions name them


def ptx(instruction: str, *operands) -> None:
    """Emit an instruction; destinations first."""
    T.evaluate(T.ptx[instruction](*operands))
