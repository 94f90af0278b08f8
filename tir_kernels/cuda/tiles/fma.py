# SPDX-License-Identifier: Apache-2.0
"""Products of tiles in float32, by fused multiply-adds: for float32 and for mixed types.

Threads hold the products as after `mma.TensorCores`, so all else is the same.
"""

from __future__ import annotations

from tvm.script import tirx as T

from ..emit import F32, Registers, index_temp
from ..warp import shuffle_from
from .online_softmax import Accumulators
from .shared_tiles import SharedTiles
from .tiling import BlockTiling

STEP = 8  # elements of a row at a time


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

    def output_pair(self, output: Accumulators, n, h: int) -> tuple:
        """Column of the n-th pair of sums of row h that a thread holds, and the sums."""
        return n * 8 + T.truncmod(self.lane, 4) * 2, output[n, h, 0], output[n, h, 1]

    def scores(self, scores: Accumulators, k: SharedTiles, stage) -> None:
        """Compute ``Q K^T``."""
        rows = range(scores.rows)
        scores.registers.fill(T.float32(0))
        with T.serial(self.num_steps) as step:
            left = [self.q.load_floats(0, self.row + 8 * h, step * STEP, STEP) for h in rows]
            with T.unroll(scores.num_tiles) as n:
                for e in range(2):
                    right = k.load_floats(stage, n * 8 + self.column + e, step * STEP, STEP)
                    for h in rows:
                        for i in range(STEP):
                            scores[n, h, e] = scores[n, h, e] + left[h][i] * right[i]

    def accumulate(
        self, output: Accumulators, weights: Accumulators, v: SharedTiles, stage
    ) -> None:
        """Add ``weights V``; the four lanes of a row tell each other the weights."""
        first_lane = self.lane - T.truncmod(self.lane, 4)
        rows, weight = range(output.rows), Registers(output.rows, F32, "weight")
        # A loop over the lanes, or the offsets of all rows would be computed beforehand and kept.
        with T.unroll(weights.num_tiles) as n, T.serial(4) as lane:
            for t in range(2):
                for h in rows:
                    weight[h] = shuffle_from(weights[n, h, t], first_lane + lane)
                row = n * 8 + lane * 2 + t
                with T.unroll(output.num_tiles) as c:
                    right = v.load_floats(stage, row, c * 8 + self.column, 2)
                    for h in rows:
                        for e in range(2):
                            output[c, h, e] = output[c, h, e] + weight[h] * right[e]
