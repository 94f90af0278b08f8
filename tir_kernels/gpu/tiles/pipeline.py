# SPDX-License-Identifier: Apache-2.0
"""The pipeline of K and V: tiles in shared memory, copied asynchronously ahead of their use."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from tvm.script import tirx as T

from ...layout import K_PLANE, V_PLANE
from ...script import inline
from ...spec import KernelSpec
from ..isa import isa_of
from ..registers import index_temp
from .kv_rows import PagedRows, RaggedRows
from .row_scales import NoScales
from .shared_tiles import CHUNK_BYTES, SharedTiles
from .tiling import THREADS_PER_ROW, BlockTiling


@inline
def zero_padding(tiles, width: int, thread, num_threads: int):
    """Clear what the rows of tiles have past `width` elements; no copy writes there."""
    if tiles.layout.chunks > width // tiles.layout.per_chunk:
        for i in T.unroll(tiles.layout.chunks - width // tiles.layout.per_chunk):
            for turn in T.serial(T.ceildiv(tiles.count * tiles.layout.rows, num_threads)):
                item = turn * num_threads + thread
                if item < tiles.count * tiles.layout.rows:
                    at = T.meta_var([f(item, tiles.layout.rows) for f in (T.truncdiv, T.truncmod)])
                    chunk = T.meta_var(width // tiles.layout.per_chunk + i)
                    tiles.memory.store(tiles.place(*at, chunk), *[T.uint32(0)] * 4)


@inline
def copy_rows(tiles, num_rows: int, num_chunks: int, threads, source):
    """Start to copy chunks of each row of the first tile, from ``source(row, chunk)``."""
    for turn in T.serial(T.ceildiv(num_rows * num_chunks, threads.num_threads)):
        item = turn * threads.num_threads + threads.thread
        if item < num_rows * num_chunks:
            row = T.meta_var(T.truncdiv(item, num_chunks))
            chunk = T.meta_var(T.truncmod(item, num_chunks))
            tiles.memory.copy(tiles.place(0, row, chunk), source(row, chunk))


@dataclass(frozen=True)
class ThreadGroup:
    """Threads that copy and read tiles together: a block, or some of its warps.

    Parameters
    ----------
    thread : int32 expression
        Index in the group.
    num_threads : int
    sync : callable
        Emits a barrier of the group.
    index, count : int32 expression, int
        Of `count` groups, each with its own stages, group `index` takes every `count`-th tile.
    """

    thread: object
    num_threads: int
    sync: Callable
    index: object = 0
    count: int = 1


@T.meta_class
class KvPipeline:
    """The stages of K and V of a thread group: every thread is producer and consumer.

    What an algorithm does between the first copies and their use comes after `begin`::

        pipeline.begin(start, end)
        isa.wait_for_copies(pipeline.ahead)  # for copies that were started before
        for tile in T.serial(pipeline.num_tiles):
            pipeline.wait(tile)
            first, stage = pipeline.first_position(tile), pipeline.stage(tile)

    Copies of at least one later tile are in flight meanwhile. Rows past the end are zeros. At the
    end other threads may still read the last tile.

    Parameters
    ----------
    spec : KernelSpec
    tiling : BlockTiling
    memory : SharedMemory
    begin : int
        Byte at which the stages begin.
    threads : ThreadGroup
        Each group of threads has stages of its own.
    v_slice : int32 expression
        Slice of the columns of V that the block sums.
    rows : PagedRows or RaggedRows
        Where K and V are; aimed at a sequence before `begin`.

    Attributes
    ----------
    k, v : SharedTiles
        A tile for each stage of each group.
    v_chunks : int or int32 expression
        Chunks of a row of V that the block sums.
    scales : NoScales
        What scores and weights are multiplied by.
    num_tiles : int32
        Tiles of the group.
    ahead : int
        Tiles whose copies `begin` starts.
    end_byte : int
        Byte of shared memory past the stages.
    """

    def __init__(
        self,
        spec: KernelSpec,
        tiling: BlockTiling,
        memory,
        begin: int,
        threads: ThreadGroup,
        v_slice,
        rows: PagedRows | RaggedRows,
    ):
        self.tiling, self.threads, self.rows = tiling, threads, rows
        self.isa = isa_of(spec.target)
        self.ahead = tiling.stages - 1
        self.row_step = threads.num_threads // THREADS_PER_ROW
        self.chunk = index_temp(T.truncmod(threads.thread, THREADS_PER_ROW))
        self.row = index_temp(T.truncdiv(threads.thread, THREADS_PER_ROW))
        self.v_begin = v_slice * tiling.columns
        # Without tensor cores, registers are what there is least of.
        self.loop = T.unroll if tiling.is_tensor else T.serial
        # All rows of a thread may be in the same place of their pages.
        steps = self.row_step, threads.count * tiling.positions
        self.keeps_slot = tiling.by_warpgroups and all(n % spec.page_size == 0 for n in steps)
        self.num_tiles = T.local_scalar("int32")
        self.start = T.local_scalar("int32")
        self.end = T.local_scalar("int32")
        self._lay_out(spec, memory, begin, v_slice)

    def _lay_out(self, spec: KernelSpec, memory, begin: int, v_slice) -> None:
        tiling, count = self.tiling, self.tiling.stages * self.threads.count
        self._lay_out_tiles(memory, begin, count, v_slice)
        self.end_byte, self.scales = self.v.end, NoScales()
        self.k_chunks = spec.qk_head_dim // tiling.k.per_chunk
        self.v_chunks = spec.v_head_dim // tiling.v.per_chunk
        if tiling.slices > 1:
            left = T.truncdiv(spec.v_head_dim - self.v_begin, tiling.v.per_chunk)
            self.v_chunks = index_temp(T.min(tiling.v.chunks, left))
        # Whether all threads of a row copy equally many chunks, without a branch.
        self.copies_evenly = all(_is_even(count) for count in (self.k_chunks, self.v_chunks))

    def _lay_out_tiles(self, memory, begin: int, count: int, v_slice) -> None:
        tiling = self.tiling
        if tiling.is_latent:
            first_chunk = v_slice * (tiling.columns // tiling.k.per_chunk)
            self.k = SharedTiles(memory, begin, tiling.k, count)
            self.v = SharedTiles(memory, begin, tiling.k, count, first_chunk)
        else:  # the tiles of a stage are side by side, so that a stage may be used otherwise
            tile_bytes = tiling.k.num_bytes + tiling.v.num_bytes
            self.k = SharedTiles(memory, begin, tiling.k, count, 0, tile_bytes)
            self.v = SharedTiles(memory, self.k.first_end, tiling.v, count, 0, tile_bytes)

    def first_position(self, tile):
        """Return the first position of a tile of the group."""
        return self.start + tile * (self.threads.count * self.tiling.positions)

    def stage(self, tile):
        """Return which tile of `k` and `v` holds a tile that was waited for."""
        return self._stage_of_copies(tile)

    def _stage_of_copies(self, tile):
        threads = self.threads
        return T.truncmod(tile, self.tiling.stages) * threads.count + threads.index

    def _position(self, tile, i):
        """Return the position of the thread's i-th row of a tile."""
        return self.first_position(tile) + i * self.row_step + self.row

    @inline
    def begin(self, start, end):
        """Start the first copies of the positions ``start .. end - 1``."""
        positions = T.meta_var(self.threads.count * self.tiling.positions)  # of all groups
        self.num_tiles = T.truncdiv(end - start + positions - 1, positions)
        self.start = start + self.threads.index * self.tiling.positions
        self.end = end
        if self.keeps_slot:
            self.rows.keep_slot(self._position(0, 0))
        self._find(T.int32(0))
        for tile in T.serial(self.ahead):  # unrolled, addresses of all copies are kept at once
            self._issue(tile)

    @inline
    def wait(self, tile):
        """Wait for a tile, and start the copies of a later one."""
        self._wait_for_copies(tile)

    @inline
    def _wait_for_copies(self, tile):
        self.isa.wait_for_copies(self.ahead - 1)
        # All copies of the tile have arrived; no thread reads the stage that is next to write.
        self.threads.sync()
        self._issue(tile + self.ahead)
        if not self.copies_evenly:
            # PTX does not promise that threads which took other branches come together again
            # by themselves, and matrix instructions require it.
            self.isa.sync_warp()

    @inline
    def _find(self, tile):
        for i in T.unroll(self.tiling.rows_per_thread):
            self.rows.find(i, T.min(self._position(tile, i), self.end - 1))

    @inline
    def _issue(self, tile):
        if tile < self.num_tiles:
            stage = self._stage_of_copies(tile)
            for i in T.unroll(self.tiling.rows_per_thread):
                position = self._position(tile, i)
                num_bytes = T.if_then_else(position < self.end, CHUNK_BYTES, 0)
                held = T.min(position, self.end - 1)
                self._copy_row(i, held, num_bytes, stage)
            self._find(tile + 1)
        self.isa.commit_copies()

    @inline
    def _copy_row(self, i, position, num_bytes, stage):
        """Copy `num_bytes` of each chunk of the thread's i-th row, which is at a position."""
        at = T.meta_var((i, position, num_bytes, stage))
        self._copy_chunks(K_PLANE, self.k, self.k_chunks, self.k_chunks, at)
        if not self.tiling.is_latent:
            self._copy_chunks(V_PLANE, self.v, self.v_chunks, self.v.layout.chunks, at)

    @inline
    def _copy_chunks(self, plane: int, tiles, num_chunks, max_chunks: int, at):
        for turn in self.loop(-(-max_chunks // THREADS_PER_ROW)):
            chunk = T.meta_var(turn * THREADS_PER_ROW + self.chunk)
            if _is_even(num_chunks):
                self._copy_chunk(plane, tiles, chunk, at)
            elif chunk < num_chunks:
                self._copy_chunk(plane, tiles, chunk, at)

    def _copy_chunk(self, plane: int, tiles: SharedTiles, chunk, at: tuple) -> None:
        i, position, num_bytes, stage = at
        column = chunk * tiles.layout.per_chunk
        if plane == V_PLANE:
            column = self.v_begin + column
        to = tiles.place(stage, i * self.row_step + self.row, chunk)
        source = self.rows.source(plane, i, position, column)
        tiles.memory.copy(to, source, CHUNK_BYTES, num_bytes)


def _is_even(num_chunks) -> bool:
    """Whether the threads of a row copy equally many of its chunks."""
    return isinstance(num_chunks, int) and num_chunks % THREADS_PER_ROW == 0
