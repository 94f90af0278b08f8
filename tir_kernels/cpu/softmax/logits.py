# SPDX-License-Identifier: Apache-2.0
"""Changes of logits before the softmax: a soft-cap, then the bias of ALiBi."""

import math

from tvm.script import tirx as T

from ...script import inline
from ...spec import LOG2E, KernelSpec
from ..isa.simd import (
    F32,
    at_least,
    at_most,
    broadcast,
    chunks,
    constant,
    literal,
    load,
    rint,
    store,
    store_row,
    temp,
    vector_type,
)

# (2**f - 1) / f on [-0.5, 0.5]: Taylor, relative error 2e-8.
_COEFFICIENTS = tuple(math.log(2) ** n / math.factorial(n) for n in range(1, 9))
_LIMIT = 40.0  # tanh(x) is 1 in float32 where 2 * x * log2(e) is beyond it


def soft_cap(score, cap: float | None, lanes: int):
    """Cap a vector of scores, which are logits times log2(e): ``cap * tanh(x / cap)``.

    ``tanh(x) = e / (e + 2)`` for ``e = exp(2 * x) - 1``, and e is computed without cancellation, so
    that small scores keep their relative accuracy of a few float32 roundings. Infinite scores
    become the cap, NaN stays NaN.
    """
    if cap is None:
        return score
    int_type, float_type = vector_type("int32", lanes), vector_type(F32, lanes)
    power = temp(score * constant(2 / cap, lanes), lanes)
    power = temp(at_least(at_most(power, _LIMIT, lanes), -_LIMIT, lanes), lanes)
    whole = temp(rint(power, lanes), lanes)
    fraction = temp(power - whole, lanes)
    less_one = constant(_COEFFICIENTS[-1], lanes)
    for c in reversed(_COEFFICIENTS[:-1]):
        less_one = less_one * fraction + constant(c, lanes)
    less_one = temp(less_one * fraction, lanes)
    exponent = T.cast(whole, int_type) + broadcast(T.int32(127), lanes)
    exponent = T.shift_left(exponent, broadcast(T.int32(23), lanes))
    scale = temp(T.reinterpret(float_type, exponent), lanes)
    e = temp(scale * less_one + (scale - constant(1.0, lanes)), lanes)
    return temp(constant(cap * LOG2E, lanes) * e / (e + constant(2.0, lanes)), lanes)


@T.meta_class
class AlibiBias:
    """A bias of rows that is linear in the distance, with a slope of each head.

    Press, Smith and Lewis, Train Short, Test Long (2022).

    Parameters
    ----------
    spec : KernelSpec
        With `alibi_slopes`.
    num_rows : int
        Rows that a task works at.
    """

    def __init__(self, spec: KernelSpec, num_rows: int):
        self.lanes, slopes = spec.target.lanes, spec.alibi_slopes
        self.table = T.alloc_buffer((len(slopes),), F32)
        for start, lanes in chunks(len(slopes), self.lanes):
            values = [slope * LOG2E for slope in slopes[start : start + lanes]]
            store(self.table, (start,), lanes, literal(values))
        self.slope = T.alloc_buffer((num_rows,), F32)
        self.position = T.alloc_buffer((num_rows,), "int32")

    @staticmethod
    def of(spec: KernelSpec, num_rows: int):
        """The bias, or None where the spec has none."""
        return AlibiBias(spec, num_rows) if spec.alibi_slopes else None

    @inline
    def set_row(self, row, head, position):
        """Let `row` be the query of a head at a position."""
        self.slope[row] = self.table[head]
        self.position[row] = position

    @inline
    def add(self, row, scores, at, first_position, offsets):
        """Add to ``scores[at]``, all of its columns, the bias of `row`.

        Parameters
        ----------
        scores : float32 ``[rows, columns]``, logits times log2(e).
        first_position : position of the first column.
        offsets : ``(column, lanes) -> int32 vector``, positions relative to it.
        """
        slope = self.slope[row]
        begin = first_position - self.position[row]
        bias = T.meta_var(
            lambda c, n: (
                T.cast(broadcast(begin, n) + offsets(c, n), vector_type(F32, n))
                * broadcast(slope, n)
            )
        )
        store_row(
            scores,
            (at,),
            int(scores.shape[1]),
            self.lanes,
            lambda c, n: load(scores, (at, c), n) + bias(c, n),
        )

    def of_rows(self, row, lanes: int, position):
        """The bias of `lanes` rows from `row` on at one position: a vector."""
        distance = broadcast(position, lanes) - load(self.position, (row,), lanes, "int32")
        return T.cast(distance, vector_type(F32, lanes)) * load(self.slope, (row,), lanes)
