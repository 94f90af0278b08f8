# SPDX-License-Identifier: Apache-2.0
"""Products of tiles in float32, by fused multiply-adds: for float32 and for mixed types.

Threads hold the products as after `mma.TensorCores`, so all else is the same.
"""

from __future__ import annotations

from tvm.script import tirx as T

from ...script import inline
from ..registers import F32, index_temp
from ..scores.softmax import clear
from .shared_tiles import SharedTiles
from .tiling import BlockTiling

STEP = 8  # elements of a row at a time


@T.meta_class
class MultiplyAdds:
    """The products of a warp.

    Parameters
    ----------
    tiling : BlockTiling
    q : SharedTiles
        The tile of Q.
    warp_row : int32 expression
        The warp's first row of it.
    lane : int32 expression
    """

    def __init__(self, tiling: BlockTiling, q: SharedTiles, warp_row, lane):
        self.q, self.lane, self.num_steps = q, lane, tiling.depth // STEP
        self.row = index_temp(warp_row + T.truncdiv(lane, 4))
        self.column = index_temp(T.truncmod(lane, 4) * 2)

    def begin(self) -> None:
        """Q stays in shared memory."""

    def reorder_q(self, threads) -> None:
        """Q is multiplied as it lies in memory."""

    def output_pair(self, o, n, h) -> tuple:
        """Column of the n-th pair of sums of row h that a thread holds, and the sums."""
        return n * 8 + self.column, o[n, h, 0], o[n, h, 1]

    @inline
    def qk(self, scores, k, stage):
        """Compute ``Q K^T``."""
        rows = T.meta_var(range(int(scores.shape[1])))
        clear(scores)
        for step in T.serial(self.num_steps):
            at = T.meta_var(step * STEP)
            left = T.meta_var([self.q.load_floats(0, self.row + 8 * h, at, STEP) for h in rows])
            for n in T.unroll(scores.shape[0]):
                for e in T.unroll(2):
                    right = T.meta_var(k.load_floats(stage, n * 8 + self.column + e, at, STEP))
                    for i in T.unroll(STEP):
                        add_products(scores, n, e, [left[h][i] for h in rows], right[i])

    @inline
    def pv(self, o, weights, v, stage):
        """Add ``weights V``; the four lanes of a row tell each other the weights."""
        rows = T.meta_var(range(int(o.shape[1])))
        first_lane = T.meta_var(self.lane - T.truncmod(self.lane, 4))
        weight = T.alloc_local((len(rows),), F32, layout=None)
        for n in T.unroll(weights.shape[0]):
            # Not unrolled, or the offsets of all rows would be computed beforehand and kept.
            for lane in T.serial(4):
                for t in T.unroll(2):
                    for h in T.unroll(len(rows)):
                        weight[h] = self.q.isa.shuffle_from(weights[n, h, t], first_lane + lane)
                    row = T.meta_var(n * 8 + lane * 2 + t)
                    for c in T.unroll(o.shape[0]):
                        right = T.meta_var(v.load_floats(stage, row, c * 8 + self.column, 2))
                        for e in T.unroll(2):
                            add_products(o, c, e, [weight[h] for h in rows], right[e])


def add_products(sums, n, e, left: list, right) -> None:
    """Add the products of a column of the right with each row of the left."""
    for h, value in enumerate(left):
        T.buffer_store(sums, sums[n, h, e] + value * right, [n, h, e])
