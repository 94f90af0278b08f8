# SPDX-License-Identifier: Apache-2.0
"""How the decode of a KV head's query rows is cut into tiles for the warps of a block."""

from __future__ import annotations

from dataclasses import dataclass, replace

from ..spec import KernelSpec
from .emit import WARP
from .shared_tiles import TileLayout
from .tiling import (
    MOST_COLUMNS,
    MOST_REGISTERS,
    REGISTER_FILE,
    THREADS_PER_ROW,
    WARP_ROWS,
    on_tensor_cores,
    round_up,
)

USUAL_WARPS = 4
MOST_ROW_WARPS = 8
# Two such blocks fit into most multiprocessors; only the smallest tiles may need more.
USUAL_BYTES = 80 * 1024
STAGES = (2, 3, 4)


@dataclass(frozen=True)
class DecodeTiling:
    """Sizes of the tiles of a block, whose warps are `row_warps` times `crews`.

    Parameters
    ----------
    row_warps : int
        Warps of a crew: each has sixteen query heads of the KV head.
    crews : int
        Groups of warps that share out the positions: each has tiles and states of its own.
    positions : int
        Of a tile of K and V.
    depth : int
        Elements of a row of Q and K, zeros behind them included.
    columns : int
        Elements of a row of V that a block sums.
    slices : int
        Blocks that share out the columns of V.
    row_slices : int
        Blocks that share out the query heads of a KV head.
    dtype, kv_dtype : str
        Of Q and O, and of K and V.
    """

    row_warps: int
    crews: int
    positions: int
    depth: int
    columns: int
    slices: int
    row_slices: int
    dtype: str
    kv_dtype: str
    stages: int = STAGES[0]

    is_latent = False  # K and V are rows of their own

    @staticmethod
    def of(spec: KernelSpec) -> DecodeTiling:
        """The tiles for a spec: all query heads of a KV head in a block, if there is room.

        Raises
        ------
        ValueError
            For heads of which not even the smallest ones fit.
        """
        unit = 16 if on_tensor_cores(spec.dtype, spec.kv_dtype) else 8
        slices = -(-spec.v_head_dim // MOST_COLUMNS)
        columns = round_up(-(-spec.v_head_dim // slices), unit)
        depth = round_up(spec.qk_head_dim, unit)
        most = spec.target.max_shared_bytes
        row_warps = MOST_ROW_WARPS
        while row_warps // 2 * WARP_ROWS >= spec.group_size:
            row_warps //= 2
        while row_warps:
            row_slices = -(-spec.group_size // (row_warps * WARP_ROWS))
            sizes = (depth, columns, slices, row_slices, spec.dtype, spec.kv_dtype)
            usual = max(1, USUAL_WARPS // row_warps)
            for num_bytes in (min(USUAL_BYTES, most), most):
                for crews in (c for c in (4, 2, 1) if c <= usual):
                    for positions in (32, 16, 8):
                        tiling = DecodeTiling(row_warps, crews, positions, *sizes)
                        fits = positions % unit == 0 and tiling.num_bytes <= num_bytes
                        if fits and tiling.rows_per_thread:
                            return tiling._with_stages(min(USUAL_BYTES, most))
            row_warps //= 2
        raise ValueError(
            f"{most} bytes of shared memory are not enough for head dims "
            f"{spec.qk_head_dim} and {spec.v_head_dim}"
        )

    def _with_stages(self, most_bytes: int) -> DecodeTiling:
        """As many stages as there is room for."""
        rings = [replace(self, stages=stages) for stages in STAGES[1:]]
        return max([self, *(r for r in rings if r.num_bytes <= most_bytes)], key=lambda r: r.stages)

    @property
    def rows(self) -> int:
        """Of Q."""
        return self.row_warps * WARP_ROWS

    @property
    def num_crew_threads(self) -> int:
        """Threads of a crew."""
        return self.row_warps * WARP

    @property
    def num_threads(self) -> int:
        """Threads of a block."""
        return self.crews * self.num_crew_threads

    @property
    def min_blocks(self) -> int:
        """Blocks of a multiprocessor, so that a thread may have all registers that there are."""
        return REGISTER_FILE // ((MOST_REGISTERS + 1) * self.num_threads)

    @property
    def rows_per_thread(self) -> int:
        """Rows of a tile of K and V that a thread copies."""
        return self.positions * THREADS_PER_ROW // self.num_crew_threads

    @property
    def block_positions(self) -> int:
        """That a block has tiles of at once."""
        return self.positions * self.crews

    @property
    def q(self) -> TileLayout:
        """Of Q."""
        return TileLayout(self.rows, self.depth, self.dtype)

    @property
    def k(self) -> TileLayout:
        """Of K."""
        return TileLayout(self.positions, self.depth, self.kv_dtype)

    @property
    def v(self) -> TileLayout:
        """Of V."""
        return TileLayout(self.positions, self.columns, self.kv_dtype)

    @property
    def state(self) -> TileLayout:
        """Of a crew's part of O, with the lse in a chunk behind it: in the place of K and V."""
        return TileLayout(self.rows, self.columns + 4, "float32")

    @property
    def num_bytes(self) -> int:
        """Of shared memory."""
        stages = self.stages * (self.k.num_bytes + self.v.num_bytes)
        return self.q.num_bytes + self.crews * max(stages, self.state.num_bytes)
