# SPDX-License-Identifier: Apache-2.0
"""Products of tiles on tensor cores: `ldmatrix` and `mma.sync`, float16 or bfloat16 to float32.

A warp computes sixteen rows, or more with the same operands from the right: to load these takes as
long as to multiply sixteen rows. All operands come from shared tiles; `softmax` tells how a thread
holds the products.
"""

from __future__ import annotations

import math

from tvm.script import tirx as T

from ...gpu.registers import I32, U32
from ...gpu.scores.softmax import ROWS, clear
from ...gpu.tiles.shared_tiles import SharedTiles
from ...gpu.tiles.tiling import WARP_ROWS
from ...script import inline
from ..ptx import SHORT_TYPES, ptx

MAX_KEPT = 64  # elements of a row of Q: with 128 there were spills
STEP = 16  # elements of a row that one instruction takes
LOAD = "ldmatrix.sync.aligned.m8n8.x4.shared.b16"
LOAD_TRANSPOSED = "ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16"


def load_matrices(instruction: str, registers, first, tiles: SharedTiles, place) -> None:
    """Load four matrices into registers from `first` on."""
    ptx(instruction, *[registers[first + i] for i in range(4)], tiles.memory.pointer(place))


@T.meta_class
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

    steps_at_once = 1  # of Q that is not kept, in registers

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
        short = SHORT_TYPES[tiling.dtype]
        self.instruction = f"mma.sync.aligned.m16n8k16.row.col.f32.{short}.{short}.f32"
        # In registers if that leaves enough of them, or loaded again for each tile.
        self.keeps_q = self.row_tiles * tiling.depth <= max_kept
        kept = self.num_steps if self.keeps_q else self.steps_at_once
        self.q_operands = T.alloc_local((4 * self.row_tiles * kept,), U32, layout=None)
        self.q_start = T.local_scalar(I32)
        self.codes = tiling.codes

    @inline
    def begin(self):
        """Take Q, which is in shared memory."""
        row = T.meta_var(self.warp_row + T.truncmod(self.lane, 16))
        self.q_start = self.q.start(0, row, T.truncdiv(self.lane, 16))
        if self.keeps_q:
            for step in T.unroll(self.num_steps):
                self.load_q(step, step)

    @inline
    def load_q(self, place, step):
        """Load the operands of a step of Q."""
        for m in T.unroll(self.row_tiles):
            byte = T.meta_var(self.q.beyond(self.q_start, m * WARP_ROWS, step * 2))
            load_matrices(LOAD, self.q_operands, (place * self.row_tiles + m) * 4, self.q, byte)

    @inline
    def multiply(self, products, n, left, place, right):
        """Add the products of all rows of a place of `left` with eight columns."""
        for m in T.unroll(self.row_tiles):
            rows = T.meta_var([(ROWS * m + h, e) for h in range(ROWS) for e in range(2)])
            sums = T.meta_var([products[n, h, e] for h, e in rows])
            first = T.meta_var((place * self.row_tiles + m) * 4)
            ptx(self.instruction, *sums, *[left[first + i] for i in range(4)], *right, *sums)

    def reorder_q(self, threads) -> None:
        """Q is multiplied as it lies in memory."""

    def output_pair(self, o, n, h) -> tuple:
        """Column of the n-th pair of sums of row h that a thread holds, and the sums."""
        return n * 8 + T.truncmod(self.lane, 4) * 2, o[n, h, 0], o[n, h, 1]

    def k_start(self, k: SharedTiles, stage):
        """Return where two chunks of sixteen rows of K begin, for the thread."""
        row = T.truncmod(self.lane, 8) + T.truncdiv(self.lane, 16) * 8
        return k.start(stage, row, T.truncmod(T.truncdiv(self.lane, 8), 2))

    def v_start(self, v: SharedTiles, stage):
        """Return where two chunks of sixteen rows of V begin, for the thread."""
        return v.start(stage, T.truncmod(self.lane, 16), T.truncdiv(self.lane, 16))

    @inline
    def qk(self, scores, k, stage):
        """Compute ``Q K^T``."""
        right = T.alloc_local((4,), U32, layout=None)
        clear(scores)
        start = self.k_start(k, stage)
        # Steps that take Q anew need no registers of their own.
        together = T.meta_var(
            self.num_steps if self.keeps_q else math.gcd(self.num_steps, self.unrolled)
        )
        for turn in T.serial(self.num_steps // together):
            for i in T.unroll(together):
                step = T.meta_var(turn * together + i)
                place = T.meta_var(step if self.keeps_q else 0)
                if not self.keeps_q:
                    self.load_q(0, step)
                for pair in T.unroll(scores.shape[0] // 2):
                    load_matrices(LOAD, right, 0, k, k.beyond(start, pair * 16, step * 2))
                    for n in T.unroll(2):
                        operand = T.meta_var([right[n * 2], right[n * 2 + 1]])
                        self.multiply(scores, pair * 2 + n, self.q_operands, place, operand)

    @inline
    def pack_weights(self, left, weights, step):
        """Narrow the weights of sixteen positions to an operand."""
        for m in T.unroll(self.row_tiles):
            for i in T.unroll(4):
                n, row = T.meta_var((step * 2 + i // 2, ROWS * m + i % 2))
                self.q.isa.pack(left[m * 4 + i], self.dtype, weights[n, row, 0], weights[n, row, 1])

    @inline
    def pv(self, o, weights, v, stage):
        """Add ``weights V``; the weights are float32, as `qk` leaves them."""
        right = T.alloc_local((4,), U32, layout=None)
        left = T.alloc_local((4 * self.row_tiles,), U32, layout=None)
        start = self.v_start(v, stage)
        for step in T.unroll(weights.shape[0] // 2):
            self.pack_weights(left, weights, step)
            for pair in T.unroll(o.shape[0] // 2):
                place = T.meta_var(v.beyond(start, step * STEP, pair * 2))
                load_matrices(LOAD_TRANSPOSED, right, 0, v, place)
                for n in T.unroll(2):
                    operand = T.meta_var([right[n * 2], right[n * 2 + 1]])
                    self.multiply(o, pair * 2 + n, left, 0, operand)
