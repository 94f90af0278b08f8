# SPDX-License-Identifier: Apache-2.0
"""Tiling of the decode of a KV head's query rows for the warps of a block."""

from __future__ import annotations

from dataclasses import dataclass, replace

from ...spec import KernelSpec
from ..registers import WARP
from .shared_tiles import TileLayout
from .tiling import (
    MAX_COLUMNS,
    MAX_FLOAT_COLUMNS,
    WARP_ROWS,
    BlockTiling,
)

USUAL_WARPS = 4
MAX_ROW_WARPS = 8
# Two such blocks fit into most multiprocessors; only the smallest tiles may need more.
USUAL_BYTES = 80 * 1024
STAGES = (2, 3, 4)


@dataclass(frozen=True, kw_only=True)
class DecodeTiling(BlockTiling):
    """Sizes of the tiles of a decode block, which has `row_warps` times `kv_groups` warps.

    Parameters
    ----------
    row_warps : int
        Warps of a group.
    warp_rows : int
        Query heads of the KV head that a warp has: 16, of which a thread holds two, or 8.
    row_slices : int
        Blocks among which the query heads of a KV head are sliced.
    is_padded : bool
        Whether rows of K are shorter than what is multiplied.
    """

    row_warps: int
    warp_rows: int
    row_slices: int
    is_padded: bool

    @staticmethod
    def of(spec: KernelSpec, *, is_widened: bool = True) -> DecodeTiling:
        """The tiles for a spec: all query heads of a KV head in a block, if there is room.

        Parameters
        ----------
        spec : KernelSpec
        is_widened : bool
            Of a spec with a codec: where codes are widened, see `CodeTiling`.

        Raises
        ------
        ValueError
            For heads of which not even the smallest ones fit.
        """
        max_bytes, group = spec.target.max_shared_bytes, spec.group_size
        widths = BlockTiling.widths(spec, spec.kv_dtype, MAX_COLUMNS)
        if spec.codec:
            widths["codes"] = replace(widths["codes"], is_widened=is_widened)
        warp_rows = WARP_ROWS
        if not widths["is_tensor"]:
            # Half of a warp's rows would be empty, or need too many registers.
            if group <= WARP_ROWS // 2 or widths["columns"] > MAX_FLOAT_COLUMNS:
                warp_rows //= 2
        row_warps = MAX_ROW_WARPS
        while row_warps // 2 * warp_rows >= group:
            row_warps //= 2
        while row_warps:
            rows = {
                "row_warps": row_warps,
                "warp_rows": warp_rows,
                "row_slices": -(-group // (row_warps * warp_rows)),
                "is_padded": widths["depth"] != spec.qk_head_dim,
            }
            usual = max(1, USUAL_WARPS // row_warps)
            for num_bytes in (min(USUAL_BYTES, max_bytes), max_bytes):
                for kv_groups in (c for c in (4, 2, 1) if c <= usual):
                    for positions in (32, 16, 8):
                        tiling = DecodeTiling(
                            kv_groups=kv_groups, positions=positions, **rows, **widths
                        )
                        has_threads = tiling.num_threads <= spec.target.max_threads
                        if tiling.is_whole and has_threads and tiling.num_bytes <= num_bytes:
                            return tiling._with_stages(min(USUAL_BYTES, max_bytes))
            row_warps //= 2
        raise BlockTiling.too_large(spec)

    @staticmethod
    def choices(spec: KernelSpec) -> list[DecodeTiling]:
        """Return the tiling for a spec, after one with another stage where that may help.

        It does on GPUs that hold as many of its blocks as there are registers for.
        """
        usual = DecodeTiling.of(spec)
        roomy = replace(usual, stages=STAGES[1])
        may_help = not usual.codes and usual.stages == STAGES[0]
        sizes = spec.target.max_shared_bytes, *spec.target.larger_shared_bytes
        fits = roomy.min_blocks * roomy.resident_bytes <= sizes[-1]
        return [roomy, usual] if may_help and fits else [usual]

    @property
    def resident_bytes(self) -> int:
        """Shared memory of a multiprocessor that a block takes; 1 KiB is the system's."""
        return self.num_bytes + 1024

    def _with_stages(self, max_bytes: int) -> DecodeTiling:
        """Return the tiling with as many stages as there is room for."""
        pipelines = [replace(self, stages=stages) for stages in STAGES[1:]]
        return max(
            [self, *(r for r in pipelines if r.num_bytes <= max_bytes)], key=lambda r: r.stages
        )

    @property
    def rows(self) -> int:
        """Return the rows of Q in a tile."""
        return self.row_warps * self.warp_rows

    @property
    def num_group_threads(self) -> int:
        """Threads of a group."""
        return self.row_warps * WARP

    @property
    def block_size(self) -> tuple[int, int]:
        """Threads of a block, and blocks of a multiprocessor, as `emit.launch` takes them."""
        return self.num_threads, self.min_blocks

    @property
    def has_code_operands(self) -> bool:
        """Whether codes are widened in registers on their way into the tensor cores."""
        return self.codes is not None and not self.codes.is_widened

    @property
    def block_positions(self) -> int:
        """Positions that the groups of a block process at once."""
        return self.positions * self.kv_groups

    @property
    def state(self) -> TileLayout:
        """The partial state of a group, its lse in a chunk after o; it replaces K and V."""
        return TileLayout(self.rows, self.columns + 4, "float32")

    @property
    def copies_beside_states(self) -> bool:
        """Whether states replace the last stage only, while K and V are copied to the others.

        Zeros past rows of K would have to be stored anew when the states have gone. Wide rows of
        V leave no registers for it.
        """
        if self.codes or self.is_padded or self.columns > MAX_FLOAT_COLUMNS:
            return False
        return self._bytes_of(self.ahead_bytes) <= max(USUAL_BYTES, self._bytes_of(0) + 1024)

    @property
    def states_begin(self) -> int:
        """Byte of shared memory at which the states begin."""
        return self.q.num_bytes + (self.ahead_bytes if self.copies_beside_states else 0)

    @property
    def num_bytes(self) -> int:
        """Return the bytes of shared memory."""
        return self._bytes_of(self.ahead_bytes if self.copies_beside_states else 0)

    def _bytes_of(self, before_states: int) -> int:
        states = before_states + self.kv_groups * self.state.num_bytes
        return self.q.num_bytes + max(self.kv_groups * self.pipeline_bytes, states)
