# SPDX-License-Identifier: Apache-2.0
"""The rows of a tile: tokens of a sequence times the query heads of a KV head.

K and V are read once for all of these heads, and few tokens fill the rows of an instruction, too.
"""

from __future__ import annotations

from tvm.script import tirx as T

from ...script import inline
from ...spec import KernelSpec
from ..isa import isa_of
from ..registers import I32, WARP
from ..tiles.tiling import Tiling


@T.meta_class
class QueryRows:
    """Indices of the rows of a tile in Q and O, and the rows that a thread has.

    Rows past the end of a sequence repeat its last one.

    Parameters
    ----------
    spec : KernelSpec
    tiling : Tiling
    work : FixedSplits or BalancedSplits
        Which tile it is.

    Attributes
    ----------
    lane, warp_row : int32
        The thread's lane, and the first row of its warp.
    count : int
        Rows of a thread.
    """

    def __init__(self, spec: KernelSpec, tiling: Tiling, work):
        self.isa = isa_of(spec.target)
        self.group, self.work, self.row_ids = spec.group_size, work, work.items.row_ids
        self.warp_rows, self.count = tiling.warp_rows, tiling.rows_of_thread
        self.joint_rows, self.tiling = tiling.joint_rows, tiling
        self.thread, self.lane, self.warp_row = (T.local_scalar(I32) for _ in range(3))

    @inline
    def begin(self, thread):
        """Find the thread's rows anew, so that registers keep nothing that depends on them."""
        self.thread = self.isa.opaque(thread)
        self.lane = T.truncmod(self.thread, WARP)
        warp = T.meta_var(T.truncdiv(self.thread, WARP))
        if self.tiling.warp_slices > 1:
            self.warp_row = T.truncmod(warp, self.tiling.row_warps) * self.warp_rows
        else:
            self.warp_row = warp * self.warp_rows

    @property
    def v_begin(self):
        """Return the first column of the block's slice of V that the warp sums."""
        tiling = self.tiling
        if tiling.warp_slices == 1:
            return 0
        return T.truncdiv(self.thread, tiling.row_warps * WARP) * tiling.columns

    @property
    def joint_row(self):
        """Return the first row of the warps that multiply together."""
        if self.joint_rows == self.warp_rows:
            return self.warp_row
        return self.warp_row - T.truncmod(self.warp_row, self.joint_rows)

    def own(self, h):
        """Return row h of the thread, in the tile."""
        return self.warp_row + T.truncdiv(self.lane, 4) + 8 * h

    def exists(self, row):
        """Whether a row of the tile is a row of the sequence."""
        return self.work.first + row < self.work.num_rows * self.group

    def _flat(self, row):
        return T.min(self.work.first + row, self.work.num_rows * self.group - 1)

    def token(self, row):
        """Return the token, within the sequence, of a row of the tile."""
        return T.truncdiv(self._flat(row), self.group)

    def head(self, row):
        """Return the query head of a row of the tile."""
        return self.work.head * self.group + T.truncmod(self._flat(row), self.group)

    def row_of_q(self, row):
        """Return the row of Q and O of a row of the tile."""
        at = self.work.first_row + self.token(row)
        return at if self.row_ids is None else self.row_ids[at]

    def index(self, row) -> tuple:
        """Return the index of a row of the tile in Q and O, and in their logs."""
        return self.isa.wide(self.row_of_q(row)), self.head(row)
