# SPDX-License-Identifier: Apache-2.0
"""Online softmax over blocks of scores in the exp2 domain, several rows at a time.

A score that is NaN or +inf makes the row NaN: its weight is NaN, by way of ``inf - inf`` for +inf,
and with it the row's sum of weights and every column of O, whatever comes later. A running maximum
that is wrong because of NaN does no harm: that row is NaN already. A score of -inf is a weight
of 0, and so is a hidden one.
"""

from __future__ import annotations

from collections.abc import Callable

from tvm.script import tirx as T

from ...semantics.softmax import NOTHING_SEEN
from ..shuffles import next_power_of_two, reduce_each
from ..simd import F32, add, broadcast, constant, exp2, load, maximum, store, temp


class OnlineSoftmax:
    """Running maximum and sum of rows that are updated in blocks.

    Parameters
    ----------
    num_blocks, rows_per_block : int
        The state of a block is padded to a power of two, so that it is one vector.
    lanes : int
        Lanes of the vectors of scores.
    """

    def __init__(self, num_blocks: int, rows_per_block: int, lanes: int):
        self.rows, self.lanes = rows_per_block, lanes
        self.stride = next_power_of_two(rows_per_block)
        self.row_max = T.alloc_buffer((num_blocks * self.stride,), F32)
        self.row_sum = T.alloc_buffer((num_blocks * self.stride,), F32)
        self.rescale = T.alloc_buffer((num_blocks * self.stride,), F32)

    def index(self, block, row):
        """Return the index of `row` of `block` in `row_max`, `row_sum` and `rescale`."""
        return block * self.stride + row

    def reset(self, block) -> None:
        """Forget all columns."""
        store(
            self.row_max, (block * self.stride,), self.stride, constant(NOTHING_SEEN, self.stride)
        )
        store(self.row_sum, (block * self.stride,), self.stride, constant(0.0, self.stride))

    def update(
        self, block, num_vectors: int, score: Callable, emit: Callable[[int, int, object], None]
    ) -> None:
        """Take in ``num_vectors * lanes`` columns.

        Afterwards `rescale` of a row is what its sums so far have to be multiplied by.

        Parameters
        ----------
        score : ``(row, vector) -> float32 vector``, evaluated twice.
        emit : ``(row, vector, value)``, receives the weights ``exp2(score - maximum)``.
        """
        lanes = self.lanes
        for first in range(0, self.rows, lanes):
            rows = range(first, min(first + lanes, self.rows))
            width = next_power_of_two(len(rows))
            at = (block * self.stride + first,)
            maxima = [_fold(maximum, [score(i, v) for v in range(num_vectors)]) for i in rows]
            old = load(self.row_max, at, width)
            new = temp(T.max(old, reduce_each(maxima, lanes, maximum)), width)
            store(self.rescale, at, width, exp2(old - new, width))
            store(self.row_max, at, width, new)
            sums = []
            for i in rows:
                top = temp(broadcast(self.row_max[self.index(block, i)], lanes), lanes)
                weights = [exp2(score(i, v) - top, lanes) for v in range(num_vectors)]
                for v, weight in enumerate(weights):
                    emit(i, v, weight)
                sums.append(temp(_fold(add, weights), lanes))
            total = load(self.row_sum, at, width) * load(self.rescale, at, width)
            store(self.row_sum, at, width, total + reduce_each(sums, lanes, add))


def _fold(combine: Callable, values: list):
    result = values[0]
    for value in values[1:]:
        result = combine(result, value)
    return result
