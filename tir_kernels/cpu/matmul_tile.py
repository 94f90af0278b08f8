# SPDX-License-Identifier: Apache-2.0
"""The register-blocked product that both multiplications of prefill consist of."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from tvm.script import tirx as T

from .columns import Chunk
from .simd import Register, constant, load, temp

UNROLL = 2


def multiply_tile(
    a,
    b,
    depth: int,
    *,
    rows: int,
    parts: Sequence[Chunk],
    start: Callable,
    finish: Callable,
    ops,
    each_step: Callable | None = None,
    is_zero=None,
) -> None:
    """Emit ``start + a @ b`` for a few rows and a few vectors of columns.

    Parameters
    ----------
    a : ``(row, k) -> scalar element``, of the operands' type, loaded from a buffer.
    b : ``(k, chunk) -> index`` into ``ops`` elements: a pair (buffer, index).
    depth : int or int32 expression
        Length of the sum in elements; even.
    rows : int
    parts : chunks of columns; ``rows * len(parts)`` accumulators have to fit the registers.
    start : ``(row, chunk) -> float32 vector``
    finish : ``(row, chunk, value)``
    ops : operands object, which has `dtype` and `add_products(accumulators, scalar, vectors)`.
    is_zero : bool expression, optional
        Whether zeros stand for `start`.
    each_step : ``(step)``, optional
        What else to do in each of the ``depth // UNROLL`` steps.
    """
    first = start if is_zero is None else lambda i, c: None
    total = {(i, c): Register(c.lanes, init=first(i, c)) for i in range(rows) for c in parts}
    if is_zero is not None:
        with T.If(is_zero):
            with T.Then():
                for register in total.values():
                    register.set(constant(0.0, register.lanes))
            with T.Else():
                for at, register in total.items():
                    register.set(start(*at))
    with T.serial(depth // UNROLL) as step:
        if each_step:
            each_step(step)
        for u in range(UNROLL):
            k = step * UNROLL + u
            columns = {
                c: temp(load(*b(k, c), c.lanes, ops.dtype), c.lanes, ops.dtype) for c in parts
            }
            for i in range(rows):
                ops.add_products([total[i, c] for c in parts], a(i, k), list(columns.values()))
    for (i, c), value in total.items():
        finish(i, c, value.get())
