# SPDX-License-Identifier: Apache-2.0
"""Online softmax over blocks of scores in the exp2 domain, several rows at a time.

A score that is NaN or +inf makes the row NaN: its weight is NaN, by way of ``inf - inf`` for +inf,
and with it the row's sum of weights and every column of O, whatever comes later. A running maximum
that is wrong because of NaN does no harm: that row is NaN already. A score of -inf is a weight
of 0, and so is a hidden one.
"""

import functools

from tvm.script import tirx as T

from ...script import inline
from ...semantics.softmax import NOTHING_SEEN
from ..isa.shuffles import next_power_of_two, reduce_each
from ..isa.simd import F32, add, broadcast, constant, exp2, load, maximum, store


@T.meta_class
class OnlineSoftmax:
    """Running maxima and sums of blocks of rows, and the factor of their earlier sums.

    Parameters
    ----------
    num_blocks, rows_per_block : int
        The state of a block is padded to a power of two, so that it is one vector.
    lanes : int
        Lanes of the vectors of scores.

    Attributes
    ----------
    row_max, row_sum, rescale : float32 arrays
        A row is at `index`. `rescale` is the factor of what its sums were before the last update.
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

    @inline
    def reset(self, block):
        """Forget all columns that the rows of a block have seen."""
        first = T.meta_var(block * self.stride)
        store(self.row_max, (first,), self.stride, constant(NOTHING_SEEN, self.stride))
        store(self.row_sum, (first,), self.stride, constant(0.0, self.stride))

    @inline
    def update(self, block, scores, first_row, weights, ops):
        """Take in all columns of a block's rows, which begin at `first_row` of `scores`.

        Their weights ``exp2(score - maximum)`` become the same rows of `weights`, as elements of
        `ops`.
        """
        if self.rows >= self.lanes:
            for i in T.unroll(self.rows // self.lanes):
                self._update(block, i * self.lanes, self.lanes, scores, first_row, weights, ops)
        if self.rows % self.lanes > 0:
            first = T.meta_var(self.rows // self.lanes * self.lanes)
            self._update(block, first, self.rows - first, scores, first_row, weights, ops)

    @inline
    def _update(self, block, first, count, scores, first_row, weights, ops):
        """Update `count` rows of a block, at most as many as a vector has lanes."""
        lanes, width = T.meta_var((self.lanes, next_power_of_two(count)))
        vectors = T.meta_var(range(int(scores.shape[1]) // lanes))
        at = T.meta_var((self.index(block, first),))

        row_maxima = T.meta_var(
            [
                _fold(
                    maximum,
                    [load(scores, (first_row + first + i, v * lanes), lanes) for v in vectors],
                )
                for i in range(count)
            ]
        )
        old = T.meta_var(load(self.row_max, at, width))
        new = T.max(old, reduce_each(row_maxima, lanes, maximum))
        store(self.rescale, at, width, exp2(old - new, width))
        store(self.row_max, at, width, new)

        row_sums = T.alloc_local((count, lanes), F32)
        for i in T.unroll(count):
            row = T.meta_var(first_row + first + i)
            top = broadcast(self.row_max[self.index(block, first + i)], lanes)
            exponentials = T.meta_var(
                [exp2(load(scores, (row, v * lanes), lanes) - top, lanes) for v in vectors]
            )
            ops.store_numbers(weights, row, exponentials)
            store(row_sums, (i, 0), lanes, _fold(add, exponentials))
        sums = T.meta_var([load(row_sums, (i, 0), lanes) for i in range(count)])
        before = T.meta_var(load(self.row_sum, at, width) * load(self.rescale, at, width))
        store(self.row_sum, at, width, before + reduce_each(sums, lanes, add))


def _fold(combine, values: list):
    return functools.reduce(combine, values)
