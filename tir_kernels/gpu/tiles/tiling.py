# SPDX-License-Identifier: Apache-2.0
"""Tiles of attention that fit into the registers and the shared memory of a block."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, replace

from ...spec import KernelSpec
from ..registers import WARP
from .code_tiling import CodeTiling
from .shared_tiles import SlabLayout, TileLayout

MAX_COLUMNS = 256  # of V that a block sums on tensor cores: 128 registers of a thread
MAX_FLOAT_COLUMNS = 128  # and in float32, with two rows in a thread; with 256 there were spills
MAX_SUMS = 16 * 128  # columns of V times rows of a warp, beside long tiles of positions
STEP_BYTES = 64  # of a block's description of its step, and of the state of its NaN-safe path
SLICE_MULTIPLE = 64  # columns: a slice begins where a swizzle does
WARP_ROWS = 16  # of an instruction
WARPGROUP_ROWS = 64  # of an instruction of four warps
MAX_ROWS = 128  # of a block
MOST_ROWS = 192  # and of one that has few variables beside its products
THREADS_PER_ROW = 8  # that copy a row of K or V: 128 bytes side by side
REGISTER_FILE = 65536
MAX_REGISTERS = 255
FEW_ROWS_STAGES = 4  # of latent rows, for sixteen rows of Q
WARPGROUP_WIDTHS = (64, 128)
# Rows of a block whose warps multiply by fours, and the positions for which it has registers.
WARPGROUP_TILES = {192: 96, 128: 128}


def round_up(value: int, multiple: int) -> int:
    """Round up to a multiple."""
    return -(-value // multiple) * multiple


def on_tensor_cores(spec: KernelSpec, kv_dtype: str) -> bool:
    """Whether Q and K of a type are multiplied on tensor cores; others are in float32."""
    return spec.target.has_tensor_cores and spec.dtype == kv_dtype != "float32"


@dataclass(frozen=True, kw_only=True)
class BlockTiling:
    """Sizes of the tiles of a block, for either kind of attention.

    Subclasses have `rows` of Q per block, `warp_rows` per warp, and `num_group_threads`.

    Parameters
    ----------
    positions : int
        Of a tile of K and V.
    depth : int
        Elements of a row of Q and K, zeros past them included.
    columns : int
        Elements of a row of V that a warp sums.
    slices : int
        Blocks among which the columns of V are sliced.
    stages : int
        Tiles of K and V in shared memory, for each group of warps.
    kv_groups : int
        Groups of warps that divide the positions; each has its own stages.
    dtype, kv_dtype : str
        Of Q and O, and of K and V as they are multiplied.
    is_tensor : bool
        Whether tensor cores multiply.
    codes : CodeTiling, optional
        Quantized pages: what is copied, to be widened to tiles of K and V.
    is_latent : bool
        V is the first columns of K.
    warp_slices : int
        Groups of warps of a block among which the columns of V are sliced.
    by_warpgroups : bool
        Whether four warps multiply together.
    """

    positions: int
    depth: int
    columns: int
    slices: int
    dtype: str
    kv_dtype: str
    is_tensor: bool
    stages: int = 2
    kv_groups: int = 1
    is_latent: bool = False
    codes: CodeTiling | None = None
    by_warpgroups: bool = False
    warp_slices: int = 1

    @staticmethod
    def widths(spec: KernelSpec, kv_dtype: str, max_float_columns: int) -> dict:
        """The sizes that head dims and types decide, by the names of fields."""
        page_dtype = kv_dtype
        if spec.codec and kv_dtype == spec.kv_dtype:
            kv_dtype = spec.dtype
        is_tensor = on_tensor_cores(spec, kv_dtype)
        multiple = 16 if is_tensor else 8
        slices = -(-spec.v_head_dim // (MAX_COLUMNS if is_tensor else max_float_columns))
        columns = round_up(
            -(-spec.v_head_dim // slices), multiple if slices == 1 else SLICE_MULTIPLE
        )
        return {
            "depth": round_up(spec.qk_head_dim, multiple),
            "columns": columns,
            "codes": CodeTiling.of(spec, page_dtype, columns),
            "slices": slices,
            "dtype": spec.dtype,
            "kv_dtype": kv_dtype,
            "is_tensor": is_tensor,
        }

    @staticmethod
    def too_large(spec: KernelSpec) -> ValueError:
        """The error for heads of which not even the smallest tiles fit."""
        return ValueError(
            f"{spec.target.max_shared_bytes} bytes of shared memory are not enough for head dims "
            f"{spec.qk_head_dim} and {spec.v_head_dim}"
        )

    @property
    def is_whole(self) -> bool:
        """Whether products take whole tiles, and each thread of a group copies some of one."""
        return self.positions % (16 if self.is_tensor else 8) == 0 and self.rows_per_thread > 0

    @property
    def joint_rows(self) -> int:
        """Rows of Q that warps multiply together, whose columns they therefore share."""
        return WARPGROUP_ROWS if self.by_warpgroups else self.warp_rows

    @property
    def rows_of_thread(self) -> int:
        """Rows of Q whose products a thread holds."""
        return self.warp_rows // 8

    @property
    def num_threads(self) -> int:
        """Threads of a block."""
        return self.kv_groups * self.num_group_threads

    @property
    def min_blocks(self) -> int:
        """Blocks of a multiprocessor, so that a thread may have all registers that there are."""
        return REGISTER_FILE // ((MAX_REGISTERS + 1) * self.num_threads)

    @property
    def rows_per_thread(self) -> int:
        """Rows of a tile of K and V that a thread copies."""
        return self.positions * THREADS_PER_ROW // self.num_group_threads

    @property
    def q(self) -> TileLayout:
        """Return the layout of a tile of Q."""
        return self._layout(self.rows, self.depth, self.dtype)

    @property
    def k(self) -> TileLayout:
        """Return the layout of a tile of K."""
        return self._layout(self.positions, self.depth, self.kv_dtype)

    @property
    def v(self) -> TileLayout:
        """Return the layout of a tile of V."""
        return self._layout(self.positions, self.columns, self.kv_dtype)

    @property
    def _layout(self) -> type[TileLayout]:
        return SlabLayout if self.by_warpgroups else TileLayout

    @property
    def ahead_bytes(self) -> int:
        """Bytes of K and V in flight per block while it multiplies."""
        return self.kv_groups * self.stage_bytes * (self.stages - 1)

    @property
    def stage_bytes(self) -> int:
        """Shared memory for a tile of K and V as it is copied."""
        return self.codes.stage_bytes(self.positions) if self.codes else self._tile_bytes

    @property
    def _tile_bytes(self) -> int:
        return self.k.num_bytes + (0 if self.is_latent else self.v.num_bytes)

    @property
    def pipeline_bytes(self) -> int:
        """Shared memory for the stages of a group, and for the tile that is multiplied."""
        stages = self.stages * self.stage_bytes
        if not self.codes or not self.codes.is_widened:
            return stages
        return stages + self._tile_bytes + self.codes.row_scales_bytes(self.positions)


@dataclass(frozen=True, kw_only=True)
class Tiling(BlockTiling):
    """Sizes of the tiles of a block that has many rows.

    Parameters
    ----------
    rows : int
        Rows of Q: tokens times the query heads of a KV head.
    warp_rows : int
        Rows of Q for each warp: 16 or 32. With 32, a row takes half of the loads from shared
        memory. The loads for 16 would keep four warps below half of the tensor cores' peak.
    """

    rows: int
    warp_rows: int

    @staticmethod
    def of(
        spec: KernelSpec, kv_dtype: str, max_rows: int = MAX_ROWS, max_bytes: int | None = None
    ) -> Tiling:
        """The largest tiles that fit, rows before positions.

        Parameters
        ----------
        spec : KernelSpec
        kv_dtype : str
        max_rows : int
        max_bytes : int, optional
            Of shared memory, where it is more than the least that GPUs of the target have.

        Raises
        ------
        ValueError
            For heads of which not even the smallest ones fit.
        """
        widths = BlockTiling.widths(spec, kv_dtype, MAX_FLOAT_COLUMNS)
        if spec.is_latent and widths["is_tensor"]:
            if not widths["codes"]:  # a latent row is copied once for all columns of V
                widths |= {"warp_slices": widths["slices"], "slices": 1}
                max_rows = min(max_rows, MAX_ROWS // widths["warp_slices"])
        sizes = [(size, WARP_ROWS) for size in (64, 32, 16) if size <= max(max_rows, WARP_ROWS)]
        # ALiBi takes two registers for each row of a thread.
        has_registers = widths["columns"] <= MAX_COLUMNS // 2 and not spec.alibi_slopes
        if max_rows >= MAX_ROWS and widths["is_tensor"]:
            if has_registers:
                sizes.insert(0, (MAX_ROWS, 2 * WARP_ROWS))
            elif max_bytes:
                sizes.insert(0, (MAX_ROWS, WARP_ROWS))
        for (rows, warp_rows), positions in itertools.product(sizes, (64, 32, 16, 8)):
            tiling = Tiling(
                rows=rows,
                warp_rows=warp_rows,
                positions=positions,
                is_latent=spec.is_latent,
                **widths,
            )
            has_registers = warp_rows * tiling.columns <= MAX_SUMS or positions <= 32
            if tiling.is_whole and has_registers and tiling.num_threads <= spec.target.max_threads:
                if tiling.num_bytes <= (max_bytes or spec.target.max_shared_bytes):
                    return tiling
        raise BlockTiling.too_large(spec)

    @staticmethod
    def of_warpgroups(spec: KernelSpec, kv_dtype: str, max_rows: int) -> Tiling | None:
        """The tiles for warps that multiply together; None where there are none."""
        widths = BlockTiling.widths(spec, kv_dtype, MAX_FLOAT_COLUMNS)
        suits = widths["depth"] == widths["columns"] and widths["depth"] in WARPGROUP_WIDTHS
        suits &= widths["is_tensor"] and not widths["codes"]
        suits &= not spec.alibi_slopes and max_rows >= MAX_ROWS
        if not spec.target.multiplies_by_warpgroups or not suits:
            return None
        rows = max(rows for rows in WARPGROUP_TILES if rows <= max_rows)
        return Tiling(
            rows=rows,
            warp_rows=WARP_ROWS,
            positions=WARPGROUP_TILES[rows],
            by_warpgroups=True,
            **widths,
        )

    @staticmethod
    def choices(spec: KernelSpec, kv_dtype: str, max_rows: int = MAX_ROWS) -> list[Tiling]:
        """The tilings of a kernel, those with more rows first; the last one fits every GPU.

        Where warps multiply together there is one for these before it, if they serve the spec.
        Otherwise only MLA has several, for GPUs whose blocks may have more shared memory: a latent
        row is so wide that few rows of Q lie beside it in 99 KB, and each tile of rows loads it
        again.
        """
        if spec.has_two_widths:  # beside two views of pages, 32 rows of a warp spilled
            max_rows = min(max_rows, MAX_ROWS // 2)
        found = [Tiling.of(spec, kv_dtype, max_rows)]
        together = Tiling.of_warpgroups(spec, kv_dtype, max_rows)
        if together is not None:
            return [together, *found]
        if found[0].warp_slices > 1:  # few warps: more tiles in flight make up for it
            few = Tiling.of(spec, kv_dtype, WARP_ROWS)
            found.append(replace(few, positions=WARP_ROWS, stages=FEW_ROWS_STAGES))
        if spec.is_latent and found[0].is_tensor:
            for max_bytes in spec.target.larger_shared_bytes:
                tiling = Tiling.of(spec, kv_dtype, max_rows, max_bytes)
                if tiling.rows > found[0].rows:
                    found.insert(0, tiling)
        return found

    @property
    def num_group_threads(self) -> int:
        """Threads of the block."""
        return self.warp_slices * self.row_warps * WARP

    @property
    def row_warps(self) -> int:
        """Warps that divide the rows."""
        return self.rows // self.warp_rows

    @property
    def o(self) -> TileLayout:
        """The tile of O, which replaces Q in the end."""
        return TileLayout(self.rows, self.warp_slices * self.columns, self.dtype)

    @property
    def num_bytes(self) -> int:
        """Return the bytes of shared memory."""
        tables = self.table_bytes + 8 * self.rows + STEP_BYTES
        return max(self.q.num_bytes, self.o.num_bytes) + self.pipeline_bytes + tables

    @property
    def table_bytes(self) -> int:
        """Return the bytes of the table of a tile's positions; row bounds follow it."""
        return round_up(4 * self.positions, 8)
