# SPDX-License-Identifier: Apache-2.0
"""Tiles of rows over the positions that they see, cut into equal splits on the device.

A tile is some rows of an item, which is a sequence or a segment that sequences share, for one KV
head. It attends to the item's positions KV tile by KV tile. The KV tiles of a step stand in the
order of items, heads, tiles of rows and positions, so that tiles over the same K and V come
together, and all blocks take as many.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import contextmanager
from dataclasses import dataclass

from tvm.script import tirx as T

from ...signatures.inputs import AttentionInputs
from ...spec import KernelSpec
from ..components.kv_rows import as_int64
from ..emit import (
    I32,
    I64,
    WARP,
    Variable,
    as_count,
    count_temp,
    index_temp,
    launch,
    opaque,
    sync_block,
)
from ..launcher import resident_blocks
from ..tiles.tiling import Tiling
from .block_states import BlockStates
from .work_item import WorkItem, sum_over

MIN_KV_TILES = 2  # of a split: one is copied while another is multiplied


@dataclass(frozen=True)
class Tile:
    """Rows of an item for one KV head.

    Parameters
    ----------
    schedule : TileSchedule
    item, head : int32 expressions
    first_row, num_rows : int32 expressions
        Of the item.
    first : int32 expression
        First row of the tile, counted in rows of the item times heads of the group.
    begin, end : int64 expressions or None
        Its KV tiles in the step, where they matter.
    """

    schedule: TileSchedule
    item: object
    head: object
    first_row: object
    num_rows: object
    first: object
    begin: object
    end: object

    def has_row(self, row):
        """Whether a row of the tile is one of the item."""
        return self.first + row < self.num_rows * self.schedule.spec.group_size

    def output_row(self, row) -> tuple:
        """Index of a row of the tile in O and its logs."""
        group = self.schedule.spec.group_size
        at = self.first + row
        row_id = self.schedule.row_id(self.first_row + T.truncdiv(at, group))
        return as_int64(row_id), self.head * group + T.truncmod(at, group)


@dataclass(frozen=True, kw_only=True)
class KvSplit:
    """A split of the positions of a tile: what a block attends to.

    Parameters
    ----------
    tile : Tile
    kv_len : int32 expression
        Positions of the tile's item.
    first, last : int32 expressions
        The positions ``first .. last - 1``.
    is_whole : bool expression
        Whether these are all positions of the tile.
    states : BlockStates
    slot : int32 expression
        Slot in `states`, if they are not.
    """

    tile: Tile
    kv_len: object
    first: object
    last: object
    is_whole: object
    states: BlockStates
    slot: object


class TileSchedule:
    """The splits of a step, as a block sees them. Subclasses say what the items are.

    Parameters
    ----------
    spec : KernelSpec
    tiling : Tiling
    count : int32 expression
        Items.
    num_blocks : int32 expression
        That share the KV tiles.
    lane : int32 expression
    """

    min_kv_tiles = 0  # of a tile: 1 where those without positions have to be visited

    def __init__(self, spec: KernelSpec, tiling: Tiling, count, num_blocks, lane):
        self.spec, self.tiling, self.count = spec, tiling, index_temp(count)
        self.total = count_temp(sum_over(self.count, self.kv_tiles_of, lane))
        size = T.truncdiv(self.total + num_blocks - 1, as_count(num_blocks))
        self.split_size = count_temp(T.max(size, T.int64(MIN_KV_TILES)))

    def kv_len(self, i):
        """Positions of item i."""
        raise NotImplementedError

    def first_row(self, i):
        """Return where the rows of item i begin."""
        raise NotImplementedError

    def num_rows(self, i):
        """Return the number of rows of item i."""
        raise NotImplementedError

    def row_id(self, at):
        """Row of Q and O, of a row counted as `first_row` does."""
        return at

    def _num_tiles(self, i):
        rows = self.num_rows(i) * self.spec.group_size
        return T.truncdiv(rows + self.tiling.rows - 1, self.tiling.rows)

    def _kv_tiles_of_tile(self, i):
        positions = self.tiling.positions
        num_kv_tiles = T.truncdiv(self.kv_len(i) + positions - 1, positions)
        return T.max(num_kv_tiles, self.min_kv_tiles) if self.min_kv_tiles else num_kv_tiles

    def kv_tiles_of(self, i):
        """KV tiles of item i, an int64."""
        return as_count(self._num_tiles(i) * self.spec.num_kv_heads) * self._kv_tiles_of_tile(i)

    def owner(self, at, lane) -> WorkItem:
        """The item of a KV tile, as `sequence`, and which of the item's it is, as `index`."""
        return WorkItem(at, self.count, self.kv_tiles_of, lane, I64)

    def pair(self, owner, at) -> Tile:
        """The tile of a KV tile, whose owner has `sequence` and `index`."""
        num_kv_tiles = index_temp(self._kv_tiles_of_tile(owner.sequence))
        number = self._number(owner.index, num_kv_tiles)
        begin = count_temp(at - owner.index + as_count(number) * num_kv_tiles)
        return self._tile(owner.sequence, number, begin, count_temp(begin + num_kv_tiles))

    @staticmethod
    def _number(index, num_kv_tiles):
        """The tile of an item that KV tile `index` of the item belongs to."""
        return index_temp(T.cast(T.truncdiv(index, as_count(num_kv_tiles)), I32))

    def _tile(self, i, number, begin=None, end=None) -> Tile:
        num_tiles = index_temp(self._num_tiles(i))
        return Tile(
            schedule=self,
            item=i,
            head=index_temp(T.truncdiv(number, num_tiles)),
            first_row=index_temp(self.first_row(i)),
            num_rows=index_temp(self.num_rows(i)),
            first=index_temp(T.truncmod(number, num_tiles) * self.tiling.rows),
            begin=begin,
            end=end,
        )

    def for_tiles(self, block, lane, states: BlockStates, body: Callable[[KvSplit], None]) -> None:
        """Emit ``body(split)`` for the splits of tiles that a block takes."""
        first = count_temp(as_count(block) * self.split_size)
        # What a block takes fits into 32 bits, and registers are scarce.
        left = Variable(T.cast(T.max(T.min(self.split_size, self.total - first), T.int64(0)), I32))
        with T.If(left.get() > 0), T.Then():
            owner = self.owner(first, lane)
            item, index = Variable(owner.sequence), Variable(owner.index, I64)
            with T.While(left.get() > 0):
                with T.While(index.get() >= self.kv_tiles_of(item.get())):
                    index.set(index.get() - self.kv_tiles_of(item.get()))
                    item.set(item.get() + 1)
                i = index_temp(item.get())
                num_kv_tiles = index_temp(self._kv_tiles_of_tile(i))
                number = self._number(index.get(), num_kv_tiles)
                begin = index_temp(T.cast(index.get() - as_count(number) * num_kv_tiles, I32))
                count = index_temp(T.min(num_kv_tiles - begin, left.get()))
                left.set(left.get() - count)
                index.set(index.get() + as_count(count))
                kv_len = index_temp(self.kv_len(i))
                bounds = [index_temp(x * self.tiling.positions) for x in (begin, begin + count)]
                body(
                    KvSplit(
                        tile=self._tile(i, number),
                        kv_len=kv_len,
                        first=bounds[0],
                        last=index_temp(T.min(bounds[1], kv_len)),
                        is_whole=count == num_kv_tiles,
                        states=states,
                        slot=index_temp(states.slot(block, begin > 0)),
                    )
                )


@contextmanager
def balanced_splits(
    spec: KernelSpec, a: AttentionInputs, tiling: Tiling, schedule_kind, *, is_continued: bool
):
    """Launch a kernel whose blocks take equal splits, then one that merges the tiles that were cut.

    Parameters
    ----------
    spec : KernelSpec
    a : the kernel's arguments.
    tiling : Tiling
    schedule_kind : type
        Subclass of `TileSchedule`, made with ``(spec, tiling, a, num_blocks, lane)``.
    is_continued : bool
        As `BlockStates` takes it.

    Yields
    ------
    emit : callable
        ``emit(body)`` launches the kernel: ``body(split, slice, thread)`` is what a block does
        with a `KvSplit`.
    """
    num_blocks = resident_blocks(tiling.num_bytes, tiling.min_blocks, tiling.slices)
    states = BlockStates(spec, num_blocks, tiling.rows, is_continued=is_continued)

    def schedule_of(lane) -> TileSchedule:
        return schedule_kind(spec, tiling, a, num_blocks, lane)

    def emit(body: Callable) -> None:
        grid = [num_blocks, tiling.slices]
        with launch(grid, tiling.num_threads, tiling.min_blocks) as ((block, v_slice), thread):
            lane = index_temp(T.truncmod(thread, WARP))

            def attend(split: KvSplit) -> None:
                sync_block()  # none reads any more what the tile before left in shared memory
                # Or all that depends on the thread only is kept in registers from tile to tile.
                body(split, v_slice, opaque(thread))

            schedule_of(lane).for_tiles(block, lane, states, attend)

    with states.allocated():
        yield emit
        states.launch_merge(a, schedule_of)
