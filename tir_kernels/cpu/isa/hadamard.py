# SPDX-License-Identifier: Apache-2.0
"""Rows multiplied with Hadamard matrices, in place: fast Walsh-Hadamard transforms of vectors."""

from __future__ import annotations

from collections.abc import Sequence

from tvm.script import tirx as T

from ...semantics.hadamard import block_factor, block_size
from .simd import constant, literal, load, shuffle, store, temp

VECTORS_AT_ONCE = 16  # that a transform keeps in registers


def transform(
    buffer,
    row: Sequence,
    parts: Sequence[tuple[int, int]],
    lanes: int,
    *,
    is_scaled: bool = True,
) -> None:
    """Multiply columns ``begin .. end - 1`` of a float32 row, for each of `parts`.

    Parameters
    ----------
    buffer : Buffer, float32, whose last axis is the row.
    row : indices of the leading axes.
    parts : as `semantics.hadamard.k_parts` gives them; blocks have `lanes` columns at least.
    lanes : float32 lanes of a vector.
    is_scaled : bool
        Whether to multiply with `block_factor`; else with matrices of 1 and -1.
    """
    for begin, end in parts:
        size = block_size(end - begin)
        inner = min(size, VECTORS_AT_ONCE * lanes)
        with T.serial((end - begin) // size) as i:
            _far_stages(buffer, row, begin + i * size, size, inner, lanes)
        with T.serial((end - begin) // inner) as i:
            factor = block_factor(end - begin) if is_scaled else 1.0
            _near_stages(buffer, row, begin + i * inner, inner, factor, lanes)


def _far_stages(buffer, row, begin, size: int, inner: int, lanes: int) -> None:
    """The stages that add columns at least `inner` apart."""
    stride = size // 2
    while stride >= inner:
        with T.serial(size // (2 * stride)) as i, T.serial(stride // lanes) as j:
            at = [(*row, begin + i * (2 * stride) + j * lanes + n * stride) for n in range(2)]
            a, b = (temp(load(buffer, index, lanes), lanes) for index in at)
            store(buffer, at[0], lanes, a + b)
            store(buffer, at[1], lanes, a - b)
        stride //= 2


def _near_stages(buffer, row, begin, size: int, factor: float, lanes: int) -> None:
    """The stages of a block that fits the registers, times a factor."""
    at = [(*row, begin + start) for start in range(0, size, lanes)]
    values = [load(buffer, index, lanes) for index in at]
    if factor != 1.0:
        values = [value * constant(factor, lanes) for value in values]
    values = [temp(value, lanes) for value in values]
    stride = len(values) // 2
    while stride:
        for i in range(len(values)):
            if not i & stride:
                a, b = values[i], values[i + stride]
                values[i], values[i + stride] = temp(a + b, lanes), temp(a - b, lanes)
        stride //= 2
    stride = lanes // 2
    while stride:
        order = [i ^ stride for i in range(lanes)]
        signs = literal([-1.0 if i & stride else 1.0 for i in range(lanes)])
        values = [temp(shuffle([v], order) + v * signs, lanes) for v in values]
        stride //= 2
    for index, value in zip(at, values, strict=True):
        store(buffer, index, lanes, value)
