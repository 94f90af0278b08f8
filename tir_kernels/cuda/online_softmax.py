# SPDX-License-Identifier: Apache-2.0
"""Online softmax over the accumulators of matrix instructions, in the exp2 domain.

A thread holds two rows of a warp's sixteen, `lane / 4` and that plus 8, and of every eight columns
two, from ``2 * (lane % 4)`` on; four lanes share a row. Register ``4 * n + 2 * h + e`` is column
``8 * n + 2 * (lane % 4) + e`` of row h.
"""

from __future__ import annotations

from tvm.script import tirx as T

from .emit import F32, Registers
from .scalars import exp2, log2, temp
from .warp import shuffle_xor

NOTHING_SEEN = -1.0e30  # running maximum of a row that has seen no column
HIDDEN = -2.0e30  # score of a column that a row must not see: exp2 of it is 0
NO_SUM = 0.5  # the sum of a row that has seen a column is at least 1: its own maximum
ROWS = 2  # of a thread


class OnlineSoftmax:
    """Running maximum, sum and output of a thread's rows.

    Parameters
    ----------
    num_tiles : int
        Of eight columns, of a block of scores.
    num_outputs : int
        Registers of the output that a thread accumulates.
    """

    def __init__(self, num_tiles: int, num_outputs: int):
        self.num_tiles = num_tiles
        self.top, self.total, self.decay = (
            Registers(ROWS, F32, name) for name in ("top", "total", "decay")
        )
        self.output = Registers(num_outputs, F32, "output")

    def reset(self) -> None:
        """Forget all columns."""
        self.top.fill(T.float32(NOTHING_SEEN))
        self.total.fill(T.float32(0))
        self.output.fill(T.float32(0))

    def update(self, scores: Registers) -> None:
        """Turn scores into weights, and scale what was summed so far.

        The sum of a row is left spread over its four lanes.
        """
        for h in range(ROWS):
            top = Registers(1, F32, "new_top")
            top[0] = self.top[h]
            with T.unroll(self.num_tiles) as n:
                for e in range(2):
                    top[0] = T.max(top[0], scores[n * 4 + h * 2 + e])
            for mask in (1, 2):
                top[0] = T.max(top[0], shuffle_xor(top[0], mask))
            self.decay[h] = exp2(self.top[h] - top[0])
            self.top[h] = top[0]
            self.total[h] = self.total[h] * self.decay[h]
            with T.unroll(self.num_tiles) as n:
                for e in range(2):
                    weight = exp2(scores[n * 4 + h * 2 + e] - self.top[h])
                    scores[n * 4 + h * 2 + e] = weight
                    self.total[h] = self.total[h] + weight
        with T.unroll(self.output.count // 4) as n:
            for e in range(4):
                self.output[n * 4 + e] = self.output[n * 4 + e] * self.decay[e // 2]

    def finish(self) -> Registers:
        """Divide by the sums; returns the base-2 logs of the sums of exponentials."""
        lse, inverse = (Registers(ROWS, F32, name) for name in ("lse", "inverse"))
        empty = T.reinterpret(F32, T.uint32(0xFF800000))
        for h in range(ROWS):
            total = temp(self.total[h])
            for mask in (1, 2):
                total = temp(total + shuffle_xor(total, mask))
            has_seen = total > T.float32(NO_SUM)
            inverse[h] = T.if_then_else(has_seen, T.float32(1) / total, T.float32(0))
            lse[h] = T.if_then_else(has_seen, self.top[h] + log2(total), empty)
        with T.unroll(self.output.count // 4) as n:
            for e in range(4):
                self.output[n * 4 + e] = self.output[n * 4 + e] * inverse[e // 2]
        return lse
