# SPDX-License-Identifier: Apache-2.0
"""Work across the lanes of several vectors at once: transposing reductions and transposes."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from .simd import F32, constant, shuffle, temp


def next_power_of_two(n: int) -> int:
    """The smallest power of two that is at least `n`."""
    return 1 << (n - 1).bit_length()


def reduce_each(vectors: Sequence, lanes: int, combine: Callable, dtype: str = F32):
    """Reduce every vector to a scalar and gather the scalars in one vector.

    Halves of two vectors share an operation, so n reductions cost n - 1 steps instead of
    ``n * log2(lanes)``.

    Parameters
    ----------
    vectors : sequence of vectors of `lanes` lanes, at most `lanes` of them.
    combine : binary operation, `add` or `maximum` of `simd`.

    Returns
    -------
    A vector of ``next_power_of_two(len(vectors))`` lanes; lane i belongs to vector i.
    """
    num_lanes = next_power_of_two(len(vectors))
    assert num_lanes <= lanes
    # Missing vectors repeat the last one: LLVM folds the duplicates.
    current = [*vectors, *([vectors[-1]] * (num_lanes - len(vectors)))]
    width = lanes  # lanes of a segment, all of which belong to one input
    while len(current) > 1:
        half, pairs = width // 2, len(current) // 2
        segments = range(0, lanes, width)
        low = [s + start + i for s in segments for start in (0, lanes) for i in range(half)]
        high = [i + half for i in low]
        current = [
            temp(combine(shuffle([a, b], low), shuffle([a, b], high)), lanes, dtype)
            for a, b in zip(current[:pairs], current[pairs:], strict=True)
        ]
        width = half
    (value,), total = current, lanes
    while width > 1:
        half = width // 2
        low = [s + i for s in range(0, total, width) for i in range(half)]
        value = combine(shuffle([value], low), shuffle([value], [i + half for i in low]))
        total, width = total // 2, half
        value = temp(value, total, dtype)
    return value


def transpose(rows: Sequence, dtype: str = F32) -> list:
    """Transpose a square block held in registers: ``len(rows)`` vectors of as many lanes."""
    lanes = len(rows)
    current = [temp(row, lanes, dtype) for row in rows]
    step = 1
    while step < lanes:
        low = [k if not k & step else lanes + (k & ~step) for k in range(lanes)]
        high = [k | step if not k & step else lanes + k for k in range(lanes)]
        following = [None] * lanes
        for i in range(lanes):
            if not i & step:
                pair = [current[i], current[i | step]]
                following[i] = temp(shuffle(pair, low), lanes, dtype)
                following[i | step] = temp(shuffle(pair, high), lanes, dtype)
        current, step = following, step * 2
    return current


def widen(value, lanes: int):
    """Append zeros to a float32 vector of `lanes` lanes: as many again."""
    return shuffle([value, constant(0.0, lanes)], range(2 * lanes))


def concatenate(vectors: Sequence, lanes: int, dtype: str = F32):
    """Join a power of two of vectors of `lanes` lanes."""
    while len(vectors) > 1:
        vectors = [
            temp(shuffle([a, b], range(2 * lanes)), 2 * lanes, dtype)
            for a, b in zip(vectors[::2], vectors[1::2], strict=True)
        ]
        lanes *= 2
    return vectors[0]
