# SPDX-License-Identifier: Apache-2.0
"""Codes brought into the order of byte dot products: transposes of bytes and of dwords."""

from __future__ import annotations

from collections.abc import Sequence

from tvm.script import tirx as T

from ..simd import shuffle, temp

INT32 = "int32"
_PER_PART = {INT32: 4, "uint8": 16}  # elements of 128 bits


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
