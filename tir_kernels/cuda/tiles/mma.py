# SPDX-License-Identifier: Apache-2.0
"""Products of tiles on tensor cores: `ldmatrix` and `mma.sync`, float16 or bfloat16 to float32.

A warp computes sixteen rows, or more with the same operands from the right: to load these takes as
long as to multiply sixteen rows. All operands come from shared tiles; `online_softmax` tells how a
thread holds the products.
"""

from __future__ import annotations

import math

from tvm.script import tirx as T

from ..elements import pack
from ..emit import U32, Registers, ptx
from .online_softmax import ROWS, Accumulators
from .shared_tiles import SharedTiles
from .tiling import WARP_ROWS

MAX_KEPT = 64  # elements of a row of Q: with 128 there were spills
STEP = 16  # elements of a row that one instruction takes
_SHORT = {"float16": "f16", "bfloat16": "bf16"}
LOAD = "ldmatrix.sync.aligned.m8n8.x4.shared.b16"
LOAD_TRANSPOSED = "ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16"


def load_matrices(instruction: str, registers: Registers, first, pointer) -> None:
    """Load four matrices into registers from `first` on."""
    ptx(instruction, *[registers[first + i] for i in range(4)], pointer)


class TensorCores:
    """The products of a warp.

    Parameters
    ----------
    tiling : BlockTiling
    q : SharedTiles
        The tile of Q.
    warp_row : int32 expression
        The warp's first row of it.
    lane : int32 expression
    max_kept : int
        Q stays in registers if its rows have no more elements.
    unrolled : int, optional
        Steps of a product with a Q that is not kept that a loop takes at once.
    """

    def __init__(
        self,
        tiling,
        q: SharedTiles,
        warp_row,
        lane,
        *,
        max_kept: int = MAX_KEPT,
        unrolled: int | None = None,
    ):
        self.q, self.warp_row, self.lane, self.dtype = q, warp_row, lane, tiling.dtype
        self.row_tiles = tiling.warp_rows // WARP_ROWS
        self.num_steps = tiling.depth // STEP
        self.unrolled = unrolled or (self.num_steps if self.row_tiles == 1 else 2)
        short = _SHORT[tiling.dtype]
        self.instruction = f"mma.sync.aligned.m16n8k16.row.col.f32.{short}.{short}.f32"
        # In registers if that leaves enough of them, or loaded again for each tile.
        self.keeps_q = self.row_tiles * tiling.depth <= max_kept
        kept = self.num_steps if self.keeps_q else 1
        self.left = Registers(4 * self.row_tiles * kept, U32, "q")

    def begin(self) -> None:
        """Take Q, which is in shared memory."""
        row = self.warp_row + T.truncmod(self.lane, 16)
        self.q_start = self.q.start(0, row, T.truncdiv(self.lane, 16))
        if self.keeps_q:
            with T.unroll(self.num_steps) as step:
                self._load_q(step, step)

    def _load_q(self, fragment, step) -> None:
        for m in range(self.row_tiles):
            first = (fragment * self.row_tiles + m) * 4
            pointer = self.q.beyond(self.q_start, m * WARP_ROWS, step * 2)
            load_matrices(LOAD, self.left, first, pointer)

    def _multiply(self, products: Accumulators, tile, a: Registers, fragment, b, b_first) -> None:
        """Add the products of fragment `fragment` of `a` with eight columns of `b`."""
        for m in range(self.row_tiles):
            d = [products[tile, ROWS * m + h, e] for h in range(ROWS) for e in range(2)]
            left = [a[(fragment * self.row_tiles + m) * 4 + i] for i in range(4)]
            ptx(self.instruction, *d, *left, b[b_first], b[b_first + 1], *d)

    def output_pair(self, output: Accumulators, n, h: int) -> tuple:
        """Column of the n-th pair of sums of row h that a thread holds, and the sums."""
        return n * 8 + T.truncmod(self.lane, 4) * 2, output[n, h, 0], output[n, h, 1]

    def scores(self, scores: Accumulators, k: SharedTiles, stage) -> None:
        """Compute ``Q K^T``."""
        lane, right = self.lane, Registers(4, U32, "right")
        scores.registers.fill(T.float32(0))
        row = T.truncmod(lane, 8) + T.truncdiv(lane, 16) * 8
        start = k.start(stage, row, T.truncmod(T.truncdiv(lane, 8), 2))
        # Steps that take Q anew need no registers of their own.
        together = self.num_steps if self.keeps_q else math.gcd(self.num_steps, self.unrolled)
        with T.serial(self.num_steps // together) as turn, T.unroll(together) as i:
            step = turn * together + i
            fragment = step if self.keeps_q else 0
            if not self.keeps_q:
                self._load_q(0, step)
            with T.unroll(scores.num_tiles // 2) as pair:
                load_matrices(LOAD, right, 0, k.beyond(start, pair * 16, step * 2))
                for half in range(2):
                    self._multiply(scores, pair * 2 + half, self.left, fragment, right, half * 2)

    def accumulate(
        self, output: Accumulators, weights: Accumulators, v: SharedTiles, stage
    ) -> None:
        """Add ``weights V``; the weights are float32, as `scores` leaves them."""
        lane, right = self.lane, Registers(4, U32, "right")
        left = Registers(4 * self.row_tiles, U32, "left")
        start = v.start(stage, T.truncmod(lane, 16), T.truncdiv(lane, 16))
        with T.unroll(weights.num_tiles // 2) as step:
            for m in range(self.row_tiles):
                for i in range(4):
                    row = ROWS * m + i % 2
                    low, high = (weights[step * 2 + i // 2, row, e] for e in range(2))
                    pack(left[m * 4 + i], self.dtype, low, high)
            with T.unroll(output.num_tiles // 2) as pair:
                load_matrices(LOAD_TRANSPOSED, right, 0, v.beyond(start, step * STEP, pair * 2))
                for i in range(2):
                    self._multiply(output, pair * 2 + i, left, 0, right, i * 2)
