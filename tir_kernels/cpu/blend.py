# SPDX-License-Identifier: Apache-2.0
"""Weighted sums of rows, where a row of weight zero counts for nothing, whatever it holds."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

from tvm.script import tirx as T

from ..semantics.partial_states import selected
from . import simd
from .row_vectors import RowNumbers


def blend(rows: Sequence, weights: Sequence, numbers: RowNumbers) -> None:
    """Sum rows times their weights into the first one, in place.

    Where no weight is zero there is code of its own: selecting costs more than converting and
    adding do.

    Parameters
    ----------
    rows : ``(buffer, indices of its leading axes)`` of each row.
    weights : float32 expressions
    """

    def emit(scale: Callable) -> None:
        for dim, count in numbers.chunks(int(rows[0][0].shape[-1])):
            total, lanes = None, min(count, numbers.lanes)
            for (buffer, row), weight in zip(rows, weights, strict=True):
                vectors = numbers.load(buffer, (*row, dim), count)
                if total is None:
                    total = [scale(x, weight, lanes) for x in vectors]
                else:
                    total = [
                        t + scale(x, weight, lanes) for t, x in zip(total, vectors, strict=True)
                    ]
            numbers.store(rows[0][0], (*rows[0][1], dim), count, total)

    with T.If(functools.reduce(T.And, [weight > T.float32(0) for weight in weights])):
        with T.Then():
            emit(lambda x, weight, lanes: x * simd.broadcast(weight, lanes))
        with T.Else():
            emit(lambda x, weight, lanes: selected(x, weight, lanes, simd))


def weighted(o, index, weight, lanes: int):
    """``o * weight``, and zero where the weight is zero, whatever o holds."""
    return selected(simd.temp(simd.load(o, index, lanes), lanes), weight, lanes, simd)
