# SPDX-License-Identifier: Apache-2.0
"""Vector expressions of any target; on GPUs, where threads are the lanes, all vectors have one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from tvm.script import tirx as T

F32 = "float32"


def vector_type(dtype: str, lanes: int) -> str:
    """Name of the TIR type of `lanes` elements of `dtype`."""
    return dtype if lanes == 1 else f"{dtype}x{lanes}"


class Chunk(NamedTuple):
    """Columns that one vector holds."""

    start: int
    lanes: int


def chunks(width: int, lanes: int) -> list[Chunk]:
    """Cover ``range(width)`` with vectors of `lanes`, a power of two, then with narrower ones."""
    covered, start = [], 0
    while start < width:
        while lanes > width - start:
            lanes //= 2
        covered.append(Chunk(start, lanes))
        start += lanes
    return covered


def ramp(start, lanes: int):
    """Indices ``start .. start + lanes - 1``; legal on the last axis only."""
    return start if lanes == 1 else T.ramp(start, 1, lanes)


def broadcast(value, lanes: int):
    """`value` in every lane."""
    return value if lanes == 1 else T.broadcast(value, lanes)


def constant(value: float, lanes: int):
    """A float32 constant in every lane."""
    return broadcast(T.float32(value), lanes)


def load(buffer, index: Sequence, lanes: int, to: str = F32):
    """Load `lanes` contiguous elements at `index` and widen them to `to`."""
    *outer, last = index
    value = buffer[(*outer, ramp(last, lanes))]
    return value if str(buffer.dtype) == to else T.cast(value, vector_type(to, lanes))


def store(buffer, index: Sequence, lanes: int, value) -> None:
    """Store `lanes` contiguous elements, which are of the buffer's type, at `index`."""
    *outer, last = index
    T.buffer_store(buffer, value, [*outer, ramp(last, lanes)])
