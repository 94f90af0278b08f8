# SPDX-License-Identifier: Apache-2.0
"""Work across the lanes of several vectors at once: transposing reductions and transposes.

`transpose_dwords` and `interleave_bytes` bring codes into the order of byte dot products.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from tvm.script import tirx as T

from .simd import F32, constant, shuffle, temp

INT32 = "int32"
_PER_PART = {INT32: 4, "uint8": 16}  # elements of 128 bits


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


def _unpack(a, b, width: int, half: int, dtype: str, num_parts: int):
    """Interleave elements of `width` lanes of two vectors, of either half of each 128 bits."""
    per_part = _PER_PART[dtype]
    lanes, order = num_parts * per_part, []
    for part in range(0, lanes, per_part):
        first = part + half * per_part // 2
        for i in range(first, first + per_part // 2, width):
            order += [*range(i, i + width), *range(lanes + i, lanes + i + width)]
    return temp(shuffle([a, b], order), lanes, dtype)


def _unpack_quad(rows: Sequence, dtype: str, num_parts: int) -> list:
    """Four vectors of four rows: of each 128 bits, elements side by side that were in columns."""
    a, b, c, d = rows
    return [
        _unpack(*pair, 2, half, dtype, num_parts)
        for first in range(2)
        for pair in [[_unpack(x, y, 1, first, dtype, num_parts) for x, y in ((a, b), (c, d))]]
        for half in range(2)
    ]


def _transpose_parts(vectors: Sequence) -> list:
    """Transpose 1, 2 or 4 vectors of int32 as a square block of their 128-bit parts."""
    if len(vectors) == 1:
        return list(vectors)
    if len(vectors) == 2:
        orders = [[*range(i, i + 4), *range(8 + i, 12 + i)] for i in (0, 4)]
        return [temp(shuffle(vectors, order), 8, INT32) for order in orders]
    low, high = [*range(0, 8), *range(16, 24)], [*range(8, 16), *range(24, 32)]
    even, odd = (
        [i + part * 8 + first for part in (0, 1, 2, 3) for i in range(4)] for first in (0, 4)
    )
    a, b, c, d = vectors
    halves = [
        [temp(shuffle(pair, order), 16, INT32) for pair in ((a, b), (c, d))]
        for order in (low, high)
    ]
    return [temp(shuffle(half, order), 16, INT32) for half in halves for order in (even, odd)]


def transpose_dwords(rows: Sequence) -> list:
    """Transpose as many vectors of dwords as a vector has lanes: 16, 8 or 4."""
    lanes = len(rows)
    num_parts = lanes // 4
    rows = [temp(row, lanes, INT32) for row in rows]
    quads = [_unpack_quad(rows[f : f + 4], INT32, num_parts) for f in range(0, lanes, 4)]
    # Vector e of a quad has, in part p, dword 4 * p + e of its four rows.
    columns = [_transpose_parts([quad[e] for quad in quads]) for e in range(4)]
    return [columns[e][p] for p in range(num_parts) for e in range(4)]


def interleave_bytes(rows: Sequence, lanes: int) -> list:
    """Four vectors of bytes as four vectors of `lanes` dwords: of the same byte of each row."""
    wide, num_bytes = f"uint8x{4 * lanes}", 4 * lanes
    rows = [temp(T.reinterpret(wide, row), num_bytes, "uint8") for row in rows]
    quad = _unpack_quad(rows, "uint8", lanes // 4)
    quads = [temp(T.reinterpret(f"int32x{lanes}", v), lanes, INT32) for v in quad]
    return _transpose_parts(quads) if lanes > 4 else quads
