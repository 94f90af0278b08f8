# SPDX-License-Identifier: Apache-2.0
"""Online softmax over the accumulators of matrix instructions, in the exp2 domain.

A thread holds every eighth row of a warp's, from `lane / 4` on, and of every eight columns two,
from ``2 * (lane % 4)`` on; four lanes share a row. Of R rows, register ``2 * (R * n + h) + e`` is
column ``8 * n + 2 * (lane % 4) + e`` of row h; matrix instructions have two rows each.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

from tvm.script import tirx as T

from ...semantics.softmax import NO_SUM, NOTHING_SEEN
from ..emit import F32, Registers
from ..scalars import exp2, log2, temp
from ..warp import any_of, shuffle_xor

ROWS = 2  # of a thread, in an instruction
SLACK = 8.0  # powers of two by which a running maximum may lag behind


class Accumulators:
    """Products of a warp, as its threads hold them.

    Parameters
    ----------
    num_columns : int
        A multiple of eight.
    name : str
        In the generated code.
    rows : int
        Of a thread.
    """

    def __init__(self, num_columns: int, name: str, rows: int = ROWS):
        self.num_tiles, self.rows = num_columns // 8, rows
        self.registers = Registers(self.num_tiles * rows * 2, F32, name)

    def register(self, n, h: int, e: int):
        """Return the register of the thread's column e in row h of tile n, of eight columns."""
        return (n * self.rows + h) * 2 + e

    def __getitem__(self, at):
        return self.registers[self.register(*at)]

    def __setitem__(self, at, value) -> None:
        self.registers[self.register(*at)] = value

    def for_each(self, body: Callable) -> None:
        """Emit ``body(n, h, e)`` for all of them."""
        with T.unroll(self.num_tiles) as n:
            for h in range(self.rows):
                for e in range(2):
                    body(n, h, e)


class OnlineSoftmax:
    """Running maximum, sum and output of a thread's rows.

    Parameters
    ----------
    num_columns : int
        Of the output.
    rows : int
        Of a thread.
    """

    def __init__(self, num_columns: int, rows: int = ROWS):
        self.rows = rows
        self.row_max, self.row_sum, self.rescale = (
            Registers(rows, F32, name) for name in ("row_max", "row_sum", "rescale")
        )
        self.output = Accumulators(num_columns, "output", rows)

    def reset(self) -> None:
        """Forget all columns."""
        self.row_max.fill(T.float32(NOTHING_SEEN))
        self.row_sum.fill(T.float32(0))
        self.output.registers.fill(T.float32(0))

    def update(self, scores: Accumulators) -> None:
        """Turn scores into weights, and scale what was summed so far where that is needed.

        Weights may be as large as ``2 ** SLACK``: after the first columns of a row its maximum
        seldom grows by more, so the output is seldom scaled. Sums come out the same. That of a row
        is left spread over its four lanes.

        The lanes of a warp vote whether to scale, so that they stay together: matrix instructions
        follow, which all of them have to reach at once.
        """
        tops = Registers(self.rows, F32, "new_top")
        for h in range(self.rows):
            tops[h] = self.row_max[h]
            with T.unroll(scores.num_tiles) as n:
                for e in range(2):
                    tops[h] = T.max(tops[h], scores[n, h, e])
            for mask in (1, 2):
                tops[h] = T.max(tops[h], shuffle_xor(tops[h], mask))
        grows = [tops[h] > self.row_max[h] + T.float32(SLACK) for h in range(self.rows)]
        with T.If(any_of(functools.reduce(T.Or, grows))), T.Then():
            for h in range(self.rows):
                self.rescale[h] = exp2(self.row_max[h] - tops[h])
                self.row_max[h] = tops[h]
                self.row_sum[h] = self.row_sum[h] * self.rescale[h]
            self._scale(self.rescale)
        for h in range(self.rows):
            with T.unroll(scores.num_tiles) as n:
                for e in range(2):
                    weight = exp2(scores[n, h, e] - self.row_max[h])
                    scores[n, h, e] = weight
                    self.row_sum[h] = self.row_sum[h] + weight

    def _scale(self, factors: Registers) -> None:
        output = self.output

        def body(n, h, e):
            output[n, h, e] = output[n, h, e] * factors[h]

        output.for_each(body)

    def finish(self) -> Registers:
        """Divide by the sums; returns the base-2 logs of the sums of exponentials."""
        lse, inverse = (Registers(self.rows, F32, name) for name in ("lse", "inverse"))
        empty = T.reinterpret(F32, T.uint32(0xFF800000))
        for h in range(self.rows):
            total = temp(self.row_sum[h])
            for mask in (1, 2):
                total = temp(total + shuffle_xor(total, mask))
            # Not its opposite: the sum of a row that has seen something that is not a number is
            # NaN, and so are the row and its log.
            is_empty = total <= T.float32(NO_SUM)
            inverse[h] = T.if_then_else(is_empty, T.float32(0), T.float32(1) / total)
            lse[h] = T.if_then_else(is_empty, empty, self.row_max[h] + log2(total))
        self._scale(inverse)
        return lse
