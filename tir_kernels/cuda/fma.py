# SPDX-License-Identifier: Apache-2.0
"""Products of tiles in float32, by fused multiply-adds: for float32 and for mixed types.

Threads hold the products as after `mma.TensorCores`, so all else is the same.
"""

from __future__ import annotations

from tvm.script import tirx as T

from .emit import F32, Registers, index_temp
from .online_softmax import ROWS
from .shared_tiles import SharedTiles
from .tiling import Tiling
from .warp import shuffle_from

STEP = 8  # elements of a row at a time


class MultiplyAdds:
    """What a warp multiplies.

    Parameters
    ----------
    tiling : Tiling
    q : SharedTiles
        The tile of Q.
    warp_row : int32 expression
        The warp's first row of it.
    lane : int32 expression
    """

    def __init__(self, tiling: Tiling, q: SharedTiles, warp_row, lane):
        self.q, self.lane, self.num_steps = q, lane, tiling.depth // STEP
        self.row = index_temp(warp_row + T.truncdiv(lane, 4))
        self.column = index_temp(T.truncmod(lane, 4) * 2)

    def begin(self) -> None:
        """Q stays in shared memory."""

    def scores(self, scores: Registers, k: SharedTiles, stage) -> None:
        """Compute ``Q K^T``."""
        scores.fill(T.float32(0))
        with T.serial(self.num_steps) as step:
            left = [self.q.load_floats(0, self.row + 8 * h, step * STEP, STEP) for h in range(ROWS)]
            with T.unroll(scores.count // 4) as n:
                for e in range(2):
                    right = k.load_floats(stage, n * 8 + self.column + e, step * STEP, STEP)
                    for h in range(ROWS):
                        at = n * 4 + h * 2 + e
                        for i in range(STEP):
                            scores[at] = scores[at] + left[h][i] * right[i]

    def accumulate(self, output: Registers, weights: Registers, v: SharedTiles, stage) -> None:
        """Add ``weights V``; the four lanes of a row tell each other the weights."""
        first_lane = self.lane - T.truncmod(self.lane, 4)
        weight = Registers(ROWS, F32, "weight")
        # A loop over the lanes, or the places of all rows would be computed beforehand and kept.
        with T.unroll(weights.count // 4) as n, T.serial(4) as lane:
            for t in range(2):
                for h in range(ROWS):
                    weight[h] = shuffle_from(weights[n * 4 + h * 2 + t], first_lane + lane)
                row = n * 8 + lane * 2 + t
                with T.unroll(output.count // 4) as c:
                    right = v.load_floats(stage, row, c * 8 + self.column, 2)
                    for h in range(ROWS):
                        for e in range(2):
                            at = c * 4 + h * 2 + e
                            output[at] = output[at] + weight[h] * right[e]
