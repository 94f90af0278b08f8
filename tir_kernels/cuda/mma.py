# SPDX-License-Identifier: Apache-2.0
"""Products of tiles on tensor cores: `ldmatrix` and `mma.sync`, float16 or bfloat16 to float32.

A warp computes sixteen rows. Operands come from shared tiles; how a thread holds the products is
told in `online_softmax`.
"""

from __future__ import annotations

from tvm.script import tirx as T

from .elements import pack
from .emit import U32, Registers, ptx
from .online_softmax import Accumulators
from .shared_tiles import SharedTiles

MOST_KEPT = 64  # elements of a row of Q: with 128 there were spills
STEP = 16  # elements of a row that one instruction takes
_SHORT = {"float16": "f16", "bfloat16": "bf16"}
_LOAD = "ldmatrix.sync.aligned.m8n8.x4.shared.b16"
_LOAD_TRANSPOSED = "ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16"


def _load(instruction: str, registers: Registers, first, pointer) -> None:
    ptx(instruction, *[registers[first + i] for i in range(4)], pointer)


class TensorCores:
    """What a warp multiplies.

    Parameters
    ----------
    tiling : BlockTiling
    q : SharedTiles
        The tile of Q.
    warp_row : int32 expression
        The warp's first row of it.
    lane : int32 expression
    most_kept : int
        Q stays in registers if its rows have no more elements.
    unrolls : bool
        Whether the steps of a product with a Q that is not kept are unrolled.
    """

    def __init__(
        self,
        tiling,
        q: SharedTiles,
        warp_row,
        lane,
        *,
        most_kept: int = MOST_KEPT,
        unrolls: bool = True,
    ):
        self.unrolls = unrolls
        self.q, self.warp_row, self.lane, self.dtype = q, warp_row, lane, tiling.dtype
        self.num_steps = tiling.depth // STEP
        short = _SHORT[tiling.dtype]
        self.instruction = f"mma.sync.aligned.m16n8k16.row.col.f32.{short}.{short}.f32"
        # In registers if that leaves enough of them, or loaded again for each tile.
        self.keeps_q = tiling.depth <= most_kept
        self.left = Registers(4 * (self.num_steps if self.keeps_q else 1), U32, "q")

    def begin(self) -> None:
        """Take Q, which is in shared memory."""
        if self.keeps_q:
            with T.unroll(self.num_steps) as step:
                self._load_q(step * 4, step)

    def _load_q(self, first, step) -> None:
        row = self.warp_row + T.truncmod(self.lane, 16)
        chunk = step * 2 + T.truncdiv(self.lane, 16)
        _load(_LOAD, self.left, first, self.q.pointer(0, row, chunk))

    def _multiply(self, products: Accumulators, tile, a: Registers, a_first, b, b_first) -> None:
        d = [products[tile, h, e] for h in range(2) for e in range(2)]
        a = [a[a_first + i] for i in range(4)]
        ptx(self.instruction, *d, *a, b[b_first], b[b_first + 1], *d)

    def scores(self, scores: Accumulators, k: SharedTiles, stage) -> None:
        """Compute ``Q K^T``."""
        lane, right = self.lane, Registers(4, U32, "right")
        scores.registers.fill(T.float32(0))
        # Steps that take Q anew need no registers of their own.
        loop = T.unroll if self.keeps_q or self.unrolls else T.serial
        with loop(self.num_steps) as step:
            left_first = step * 4 if self.keeps_q else 0
            if not self.keeps_q:
                self._load_q(0, step)
            with T.unroll(scores.num_tiles // 2) as pair:
                row = pair * 16 + T.truncmod(lane, 8) + T.truncdiv(lane, 16) * 8
                chunk = step * 2 + T.truncmod(T.truncdiv(lane, 8), 2)
                _load(_LOAD, right, 0, k.pointer(stage, row, chunk))
                for i in range(2):
                    self._multiply(scores, pair * 2 + i, self.left, left_first, right, i * 2)

    def accumulate(
        self, output: Accumulators, weights: Accumulators, v: SharedTiles, stage
    ) -> None:
        """Add ``weights V``; the weights are float32, as `scores` leaves them."""
        lane, left, right = self.lane, Registers(4, U32, "left"), Registers(4, U32, "right")
        with T.unroll(weights.num_tiles // 2) as step:
            for i in range(4):
                low, high = (weights[step * 2 + i // 2, i % 2, e] for e in range(2))
                pack(left[i], self.dtype, low, high)
            with T.unroll(output.num_tiles // 2) as pair:
                row = step * STEP + T.truncmod(lane, 16)
                chunk = pair * 2 + T.truncdiv(lane, 16)
                _load(_LOAD_TRANSPOSED, right, 0, v.pointer(stage, row, chunk))
                for i in range(2):
                    self._multiply(output, pair * 2 + i, left, 0, right, i * 2)
