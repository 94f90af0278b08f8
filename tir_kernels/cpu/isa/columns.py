# SPDX-License-Identifier: Apache-2.0
"""Walk over the columns of a row whose width is a multiple of 8, in whole vectors."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from tvm.script import tirx as T

from ...vectors import Chunk, chunks


def for_chunks(width: int, lanes: int, body: Callable[[int, int], None]) -> None:
    """Emit ``body(start, lanes)`` for the vectors of a row."""
    for chunk in chunks(width, lanes):
        body(chunk.start, chunk.lanes)


def steps(width: int, lanes: int, per_step: int) -> Iterator[tuple[object, list[Chunk]]]:
    """Yield ``(first_column, chunks)`` of steps of `per_step` vectors, then of the rest.

    Chunks of a step start at columns relative to `first_column`.
    """
    step = per_step * lanes
    whole = width // step
    if whole == 1:
        yield 0, chunks(step, lanes)
    elif whole > 1:
        with T.serial(whole) as i:
            yield i * step, chunks(step, lanes)
    if width % step:
        yield whole * step, chunks(width % step, lanes)
