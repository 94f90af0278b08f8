# SPDX-License-Identifier: Apache-2.0
"""Walk over the columns of a row whose width is a multiple of 8, in whole vectors."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from tvm.script import tirx as T


class Chunk(NamedTuple):
    """Columns that one vector holds."""

    start: int
    lanes: int


class Panels:
    """A matrix whose columns lie in panels, as wide as register tiles are.

    A product so reads memory in order. Rows of the whole matrix would lie a power of two apart, and
    the panel would keep all of a few sets of the L1 cache.
    """

    def __init__(self, rows: int, columns: int, width: int, dtype: str):
        self.width = width
        self.buffer = T.alloc_buffer((-(-columns // width), rows, width), dtype)

    def at(self, row, column) -> tuple:
        """Buffer and index of an element."""
        return self.buffer, (column // self.width, row, column % self.width)


def chunks(width: int, lanes: int) -> list[Chunk]:
    """Split `width` columns into vectors of `lanes`, then one of 8 where a half is left."""
    whole = [Chunk(start, lanes) for start in range(0, width - lanes + 1, lanes)]
    done = len(whole) * lanes
    tail = width - done
    while tail:  # widths are multiples of 8, so this is one step for 16 lanes, none for fewer
        part = 1 << (tail.bit_length() - 1)
        whole.append(Chunk(done, part))
        done, tail = done + part, tail - part
    return whole


def for_columns(
    width: int, lanes: int, per_step: int, body: Callable[[object, list[Chunk]], None]
) -> None:
    """Emit ``body(first_column, chunks)`` for steps of `per_step` vectors, then for the rest.

    Parameters
    ----------
    width, lanes : int
        Columns in all, and of a vector.
    per_step : int
        Vectors of a step; chunks of a step start at columns relative to `first_column`.
    """
    step = per_step * lanes
    whole = width // step
    if whole == 1:
        body(0, chunks(step, lanes))
    elif whole > 1:
        with T.serial(whole) as i:
            body(i * step, chunks(step, lanes))
    if width % step:
        body(whole * step, chunks(width % step, lanes))
