# SPDX-License-Identifier: Apache-2.0
"""The pipeline of K and V: tiles in shared memory, copied asynchronously ahead of their use."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from tvm.script import tirx as T

from ..emit import I32, index_temp, ptx, sync_warp
from .shared_tiles import CHUNK_BYTES, SharedTiles
from .tiling import THREADS_PER_ROW, BlockTiling

_COPY = "cp.async.cg.shared.global.L2::128B"
_COPY_SMALL = "cp.async.ca.shared.global.L2::128B"


def copy_chunk(to, source, num_bytes=CHUNK_BYTES) -> None:
    """Copy 16 bytes to shared memory, the rest of them zeros where `num_bytes` are less."""
    ptx(_COPY, to, source, CHUNK_BYTES, T.cast(num_bytes, "uint32"))


def copy_bytes(to, source, size: int, num_bytes) -> None:
    """Copy 4, 8 or 16 bytes to shared memory, the rest of them zeros where `num_bytes` are less."""
    if size == CHUNK_BYTES:
        copy_chunk(to, source, num_bytes)
    else:
        ptx(_COPY_SMALL, to, source, size, T.cast(num_bytes, "uint32"))


def commit() -> None:
    """Close the group of the copies since the last one."""
    ptx("cp.async.commit_group")


def wait(groups_left: int) -> None:
    """Wait for all groups of this thread but the last ones."""
    ptx("cp.async.wait_group", groups_left)


def zero_padding(tiles: SharedTiles, width: int, thread, num_threads: int) -> None:
    """Clear what the rows of tiles have behind `width` elements; no copy writes there."""
    layout = tiles.layout
    begin, end = width // layout.per_chunk, layout.chunks
    rows = tiles.count * layout.rows
    for chunk in range(begin, end):
        with T.serial(T.ceildiv(rows, num_threads)) as turn:
            item = index_temp(turn * num_threads + thread)
            with T.If(item < rows), T.Then():
                tile, row = T.truncdiv(item, layout.rows), T.truncmod(item, layout.rows)
                ptx("st.shared.v4.b32", tiles.pointer(tile, row, chunk), *[T.uint32(0)] * 4)


def copy_rows(
    tiles: SharedTiles, num_rows: int, chunks: int, threads: ThreadGroup, pointer
) -> None:
    """Start to copy `chunks` of each row of the first tile, from ``pointer(row, chunk)``."""
    items = num_rows * chunks
    with T.serial(T.ceildiv(items, threads.num_threads)) as turn:
        item = index_temp(turn * threads.num_threads + threads.thread)
        with T.If(item < items), T.Then():
            row, chunk = T.truncdiv(item, chunks), T.truncmod(item, chunks)
            copy_chunk(tiles.pointer(0, row, chunk), pointer(row, chunk))


def _is_even(num_chunks) -> bool:
    """Whether the threads of a row copy equally many of its chunks."""
    return isinstance(num_chunks, int) and num_chunks % THREADS_PER_ROW == 0


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


class KvPipeline:
    """The stages of K and V of a thread group: every thread is producer and consumer.

    Parameters
    ----------
    tiling : BlockTiling
    k, v : SharedTiles
        A tile for each stage of each group.
    threads : ThreadGroup
    k_chunks : int
        Chunks of a row of K.
    v_chunks : int or int32 expression
        Chunks of a row of V that the block sums.
    v_begin : int32 expression
        First of these columns.
    """

    def __init__(
        self, tiling: BlockTiling, k, v, threads: ThreadGroup, *, k_chunks: int, v_chunks, v_begin
    ):
        self.tiling, self.k, self.v, self.threads = tiling, k, v, threads
        self.chunk = index_temp(T.truncmod(threads.thread, THREADS_PER_ROW))
        self.row = index_temp(T.truncdiv(threads.thread, THREADS_PER_ROW))
        self.k_chunks, self.v_chunks, self.v_begin = k_chunks, v_chunks, v_begin

    scales = None  # K and V are multiplied as they are

    @property
    def end(self) -> int:
        """Byte of shared memory behind the stages."""
        return self.v.end

    @property
    def _copies_evenly(self) -> bool:
        """Whether all threads of a row copy equally many chunks, without a branch."""
        return all(_is_even(count) for count in (self.k_chunks, self.v_chunks))

    @property
    def _row_step(self) -> int:
        return self.threads.num_threads // THREADS_PER_ROW

    def for_tiles(
        self, rows, start, end, body: Callable, once: Callable = lambda groups_left: None
    ) -> None:
        """Emit ``body(first, stage)`` for the group's tiles of the positions ``start .. end - 1``.

        Copies of at least one later tile are in flight meanwhile. Rows past the end are zeros. At
        the end other threads may still read the last tile.

        Parameters
        ----------
        rows : where K and V are, such as `rows.PagedRows`.
        once : callable
            Emits what comes between the first copies and their use; takes the number of groups of
            copies that were closed since the call.
        """
        tiling, threads, ahead = self.tiling, self.threads, self.tiling.stages - 1
        positions = threads.count * tiling.positions  # of all groups together
        num_tiles = index_temp(T.truncdiv(end - start + positions - 1, positions))
        own_start = index_temp(start + threads.index * tiling.positions)

        def position_of(tile, i):
            return own_start + tile * positions + i * self._row_step + self.row

        def stage_of(tile):
            return index_temp(T.truncmod(tile, tiling.stages) * threads.count + threads.index)

        def held(position):
            return T.min(position, end - 1)

        def find(tile):
            with T.unroll(tiling.rows_per_thread) as i:
                rows.find(i, held(position_of(tile, i)))

        def issue(tile):
            with T.If(tile < num_tiles), T.Then():
                stage = stage_of(tile)
                with T.unroll(tiling.rows_per_thread) as i:
                    position = index_temp(position_of(tile, i))
                    num_bytes = index_temp(T.if_then_else(position < end, CHUNK_BYTES, 0))
                    at = index_temp(held(position))
                    self._copy_row(rows, i, at, num_bytes, stage)
                find(tile + 1)
            commit()

        find(T.int32(0))
        for tile in range(ahead):
            issue(T.int32(tile))
        once(ahead)
        with T.serial(num_tiles) as tile:
            wait(ahead - 1)
            # All copies of the tile have arrived; no thread reads the stage that is next to write.
            threads.sync()
            issue(tile + ahead)
            if not self._copies_evenly:
                # PTX does not promise that threads which took other branches come together again
                # by themselves, and matrix instructions require it.
                sync_warp()
            body(index_temp(own_start + tile * positions), stage_of(tile))

    def _copy_row(self, rows, i, position, num_bytes, stage) -> None:
        """Copy `num_bytes` of each chunk of the thread's i-th row, which is at a position."""
        row = i * self._row_step + self.row
        # Without tensor cores, registers are what there is least of.
        loop = T.unroll if self.tiling.is_tensor else T.serial

        def copy(tiles, pointer, num_chunks, max_chunks: int, first_column):
            with loop(-(-max_chunks // THREADS_PER_ROW)) as k:
                chunk = k * THREADS_PER_ROW + self.chunk
                column = first_column + chunk * tiles.layout.per_chunk
                to = tiles.pointer(stage, row, chunk)
                if _is_even(num_chunks):
                    copy_chunk(to, pointer(i, position, column), num_bytes)
                else:
                    with T.If(chunk < num_chunks), T.Then():
                        copy_chunk(to, pointer(i, position, column), num_bytes)

        copy(self.k, rows.k_pointer, self.k_chunks, self.k_chunks, T.cast(0, I32))
        if self.tiling.is_latent:
            return
        copy(self.v, rows.v_pointer, self.v_chunks, self.v.layout.chunks, self.v_begin)
