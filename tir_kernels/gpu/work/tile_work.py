# SPDX-License-Identifier: Apache-2.0
"""The work of the blocks that have tiles of rows: which tile, and which of its positions.

An item is a sequence, or a segment that sequences share. A tile is some of its rows for one KV
head. Nothing is planned on the host: a block finds its work from the starts of the items. Where
tiles are too few, or their positions too many, for a block each, several blocks split a tile:

`FixedSplits`
    All tiles are cut into equally many splits of what their rows see. Masks leave tiles with
    different numbers of columns, and the GPU gives blocks to multiprocessors as these become free.
`BalancedSplits`
    As many blocks as the GPU holds take equally many positions of the tiles in a row. This is for
    rows that all see about the whole item, of which there may be few with very different lengths.

Both are gone through with ``work.take_split(lane)``, ``while work.has_next(): work.advance()``.
Then `item`, `head`, `slice` (of the columns of V), `first_row` and `num_rows` (of the item),
`first` (row of the tile, in rows times heads of the group) and `kv_len` say which tile it is;
``work.clip(mask)`` leaves a mask the columns of the split; `is_whole` says whether these are all,
and ``work.state_index(rows, row)`` where the partial state of a row belongs if they are not.
"""

from __future__ import annotations

import operator

from tvm import tirx
from tvm.script import tirx as T

from ...script import inline
from ...spec import KernelSpec
from ..isa import isa_of
from ..registers import I32, WARP
from ..scores.query_rows import QueryRows
from ..tiles.tiling import Tiling
from .partial_states import MERGE_BLOCK_SIZE, MERGED_ROWS, BlockStates, PartialStates
from .work_items import Items, ItemSearch

MIN_COLUMNS = 256  # that a block takes: loading Q, keeping states and merging them costs as much
MIN_KV_TILES = 2  # of a split: one is copied while another is multiplied


@T.meta_class
class TileWork:
    """The tile of rows that a block works at; subclasses say which one that is.

    Parameters
    ----------
    spec : KernelSpec
    tiling : Tiling
    items : Items
    v_slice : int32 expression
        Slice of the columns of V that the block sums.
    dtype : str
        Of counts of pieces of work.
    """

    def __init__(self, spec: KernelSpec, tiling: Tiling, items: Items, v_slice, dtype: str):
        self.isa = isa_of(spec.target)
        self.tiling, self.items, self.slice = tiling, items, v_slice
        self.group_size, self.num_kv_heads = spec.group_size, spec.num_kv_heads
        self.search = ItemSearch(self.isa, dtype)
        self.left, self.item, self.head, self.first = (T.local_scalar(I32) for _ in range(4))
        self.first_row, self.num_rows, self.kv_len = (T.local_scalar(I32) for _ in range(3))

    @property
    def variables(self) -> tuple:
        """Return the variables that say which tile it is, and where its state is."""
        return self.head, self.first, self.first_row, self.num_rows, self.kv_len

    def num_tiles(self, i):
        """Return the number of tiles of the rows of item i, for a KV head."""
        rows = self.items.num_rows(i) * self.group_size
        return T.truncdiv(rows + self.tiling.rows - 1, self.tiling.rows)

    def has_next(self):
        """Whether there is work left."""
        if self.tiling.by_warpgroups:  # or dead values stay in registers
            return self.isa.in_all_lanes(self.left) > 0
        return self.left > 0

    @inline
    def begin_item(self):
        """Find the rows and the positions of the item."""
        self.first_row = self.items.first_row(self.item)
        self.num_rows = self.items.num_rows(self.item)
        self.kv_len = self.items.kv_len(self.item)


# ---- A tile for each block -----------------------------------------------------------------------


class FixedSplits(TileWork):
    """A block takes one tile of rows, and one of the splits of the columns that these see.

    Of a sequence the last rows, which see most, come first.

    Parameters
    ----------
    spec : KernelSpec
    tiling : Tiling
    items : Items
    blocks : tuple of int32 expressions
        The tile, the KV head and slice of V, and the split of the block.
    splits : int32 expression
    """

    def __init__(self, spec: KernelSpec, tiling: Tiling, items: Items, blocks, splits):
        self.tile, self.head_slice, self.split = blocks
        self.splits, self.is_whole = splits, splits == 1
        super().__init__(spec, tiling, items, T.truncmod(self.head_slice, tiling.slices), I32)

    @inline
    def take_split(self, lane):
        """Find the tile of the block; there may be none."""
        self.search.find(self.tile, self.items.count, self.num_tiles, lane)
        self.item = self.search.item
        self.first = (self.search.count - 1 - self.search.index) * self.tiling.rows
        self.left = T.cast(self.item >= 0, I32)

    @inline
    def advance(self):
        """Start the only tile of the block."""
        self.left = 0
        self.head = T.truncdiv(self.head_slice, self.tiling.slices)
        self.begin_item()

    @inline
    def clip(self, mask):
        """Leave the columns of the split to a mask that has `start` and `end` of all of them."""
        mask.start = T.min(mask.start, mask.end)  # it may be as large as numbers are
        tiles = T.meta_var(T.ceildiv(mask.end - mask.start, self.tiling.positions))
        size = T.truncdiv(tiles + self.splits - 1, self.splits)
        size = T.max(size * self.tiling.positions, MIN_COLUMNS)
        mask.start += self.split * size
        mask.end = T.min(mask.end, mask.start + size)

    def state_index(self, rows: QueryRows, row) -> tuple:
        """Return where the partial state of a row is."""
        return (self.split, *rows.index(row))


class FixedWork(PartialStates):
    """The grid of blocks with `FixedSplits`, and a state of each row for each of the splits.

    Parameters
    ----------
    spec : KernelSpec
    tiling : Tiling
    a : the kernel's arguments.
    items : Items
    num_positions : integer expression
        No item has more of them; known to the host.
    """

    def __init__(self, spec: KernelSpec, tiling: Tiling, a, items: Items, num_positions):
        self.tiling, self.a, self.items = tiling, a, items
        # An upper bound: each sequence has at most one partial tile.
        max_tiles = T.truncdiv(a.q.shape[0] * spec.group_size, tiling.rows) + items.count
        head_slices = spec.num_kv_heads * tiling.slices
        resident = isa_of(spec.target).resident_blocks(tiling.num_bytes, tiling.min_blocks)
        max_splits = T.cast(T.truncdiv(num_positions + MIN_COLUMNS - 1, MIN_COLUMNS), I32)
        splits = T.min(T.truncdiv(resident, T.max(max_tiles * head_slices, 1)), max_splits)
        self.splits = T.bind(T.max(splits, 1), var=tirx.Var("splits", I32))
        self.grid = [max_tiles, head_slices, self.splits]
        num_states = T.if_then_else(self.splits > 1, self.splits, 0)
        super().__init__(spec, (num_states, T.cast(a.q.shape[0], I32), spec.num_qo_heads))

    def of_block(self, blocks) -> FixedSplits:
        """Return the work of a block of the grid."""
        return FixedSplits(self.spec, self.tiling, self.items, blocks, self.splits)

    @inline
    def launch_merge(self):
        """Merge the states of the rows that items have; with one split there are none."""
        num_heads = T.meta_var(self.spec.num_qo_heads)
        num_blocks = T.meta_var(T.ceildiv(T.cast(self.a.q.shape[0], I32) * num_heads, MERGED_ROWS))
        if self.splits > 1:
            size = T.meta_var(MERGE_BLOCK_SIZE)
            with self.isa.launch([num_blocks], *size) as (blocks, thread):
                lane = T.truncmod(thread, WARP)
                at = blocks[0] * MERGED_ROWS + T.truncdiv(thread, WARP)
                row = T.truncdiv(at, num_heads)
                head = T.truncmod(at, num_heads)
                if row < self.items.first_row(self.items.count):
                    output = T.meta_var((self.isa.wide(row), head))
                    self.merge(self.a, lambda i: (i, *output), self.splits, output, lane)


# ---- As many positions for each block ------------------------------------------------------------


class BalancedSplits(TileWork):
    """A block takes as many KV tiles as any other; they may be of several tiles of rows.

    A KV tile is a tile of positions, for a tile of rows. The KV tiles of a step stand in the order
    of items, heads, tiles of rows and positions, so that tiles over the same K and V come together.

    Parameters
    ----------
    spec : KernelSpec
    tiling : Tiling
    items : Items
    blocks : tuple of int32 expressions
        The block, and its slice of V.
    states : BlockStates
    """

    def __init__(self, spec: KernelSpec, tiling: Tiling, items: Items, blocks, states: BlockStates):
        self.block, v_slice = blocks
        super().__init__(spec, tiling, items, v_slice, spec.target.wide_dtype)
        self.states = states
        wide = self.isa.wide_variable
        self.total, self.split_size, self.index = (wide() for _ in range(3))
        self.tile_begin, self.tile_end = wide(), wide()
        self.start, self.end, self.slot, self.whole = (T.local_scalar(I32) for _ in range(4))
        self.num_kv_tiles, self.kv_tile = T.local_scalar(I32), T.local_scalar(I32)

    @property
    def variables(self) -> tuple:
        """Return the variables that say which tile it is, and where its state is."""
        tile = self.head, self.first, self.first_row, self.num_rows, self.kv_len
        return *tile, self.slot, self.whole

    @property
    def is_whole(self):
        """Whether the block sees all columns of the tile."""
        return self.whole != 0

    def _kv_tiles_of_tile(self, i):
        positions = self.tiling.positions
        num_kv_tiles = T.truncdiv(self.items.kv_len(i) + positions - 1, positions)
        return T.max(num_kv_tiles, 1) if self.items.are_all_visited else num_kv_tiles

    def kv_tiles_of(self, i):
        """Return the KV tiles of item i, a wide integer."""
        return self.isa.wide(self.num_tiles(i) * self.num_kv_heads) * self._kv_tiles_of_tile(i)

    @inline
    def measure(self, lane):
        """Find how many KV tiles there are, and how many a block takes."""
        self.total = self.isa.wide(0)
        for turn in T.serial(T.ceildiv(self.items.count, WARP)):
            i = turn * WARP + lane
            if i < self.items.count:
                self.total += self.kv_tiles_of(i)
        self.total = self.isa.over_lanes(self.total, operator.add)
        num_blocks = T.meta_var(self.states.num_blocks)
        size = T.meta_var(T.truncdiv(self.total + num_blocks - 1, self.isa.wide(num_blocks)))
        self.split_size = T.max(size, self.isa.wide(MIN_KV_TILES))

    @inline
    def take_split(self, lane):
        """Take the split of the block: the end of one tile, whole ones, and another begun."""
        self.measure(lane)
        first = self.isa.wide(self.block) * self.split_size
        # The share of a block fits into 32 bits, and registers are scarce.
        left = T.meta_var(T.max(T.min(self.split_size, self.total - first), self.isa.wide(0)))
        self.left = T.cast(left, I32)
        if self.left > 0:
            self.find_item(first, lane)

    @inline
    def find_item(self, kv_tile, lane):
        """Find the item of a KV tile, and which of the item's it is."""
        self.search.find(kv_tile, self.items.count, self.kv_tiles_of, lane)
        self.item = self.search.item
        self.index = self.search.index

    @inline
    def find_tile(self):
        """Find the tile of the item's KV tile `index`, and which of the tile's this is."""
        self.num_kv_tiles = self._kv_tiles_of_tile(self.item)
        number = T.cast(T.truncdiv(self.index, self.isa.wide(self.num_kv_tiles)), I32)
        self.kv_tile = T.cast(self.index - self.isa.wide(number) * self.num_kv_tiles, I32)
        num_tiles = self.num_tiles(self.item)
        self.head = T.truncdiv(number, num_tiles)
        self.first = T.truncmod(number, num_tiles) * self.tiling.rows
        self.begin_item()

    @inline
    def advance(self):
        """Advance to the next tile."""
        self.isa.sync_block()  # none reads any more what the tile before left in shared memory
        while self.index >= self.kv_tiles_of(self.item):
            self.index -= self.kv_tiles_of(self.item)
            self.item += 1
        self.find_tile()
        count = T.min(self.num_kv_tiles - self.kv_tile, self.left)
        self.left -= count
        self.index += self.isa.wide(count)
        self.start = self.kv_tile * self.tiling.positions
        self.end = T.min((self.kv_tile + count) * self.tiling.positions, self.kv_len)
        self.whole = T.cast(count == self.num_kv_tiles, I32)
        self.slot = self.states.slot(self.block, self.kv_tile > 0)

    @inline
    def clip(self, mask):
        """Leave the columns of the split to a mask that has `start` and `end` of all of them."""
        mask.start = T.max(mask.start, self.start)
        mask.end = T.min(mask.end, self.end)

    def state_index(self, rows: QueryRows, row) -> tuple:
        """Return where the partial state of a row is."""
        return self.slot, row

    @inline
    def find_cut(self, lane):
        """Find the tile that the end of the block's split cuts; `begins_in_split` if one is."""
        self.measure(lane)
        cut = self.isa.wide(self.block + 1) * self.split_size
        self.tile_begin = cut  # none
        if cut < self.total:
            self.find_item(cut, lane)
            self.find_tile()
            self.tile_begin = cut - self.isa.wide(self.kv_tile)
            self.tile_end = self.tile_begin + self.isa.wide(self.num_kv_tiles)

    def begins_in_split(self):
        """Whether the tile that is cut begins in the split: its block merges it."""
        end = self.isa.wide(self.block + 1) * self.split_size
        return T.And(self.tile_begin < end, self.tile_begin >= end - self.split_size)

    def num_splits(self):
        """Return the number of splits that have some of the tile, from the block's on."""
        return T.cast(T.truncdiv(self.tile_end - 1, self.split_size), I32) - self.block + 1


class BalancedWork(BlockStates):
    """The grid of blocks with `BalancedSplits`, and two states of rows for each of them.

    Parameters
    ----------
    spec, tiling, a, items : see `FixedWork`
    is_continued : bool
        As `BlockStates` takes it.
    """

    def __init__(self, spec: KernelSpec, tiling: Tiling, a, items: Items, is_continued: bool):
        self.tiling, self.a, self.items = tiling, a, items
        num_blocks = isa_of(spec.target).resident_blocks(
            tiling.num_bytes, tiling.min_blocks, tiling.slices
        )
        self.grid = [num_blocks, tiling.slices]
        super().__init__(spec, num_blocks, tiling.rows, is_continued)

    def of_block(self, blocks) -> BalancedSplits:
        """Return the work of a block of the grid."""
        return BalancedSplits(self.spec, self.tiling, self.items, blocks, self)

    @inline
    def launch_merge(self):
        """Merge the states of the tiles that were cut."""
        grid = T.meta_var([self.num_blocks, -(-self.tiling.rows // MERGED_ROWS)])
        size = T.meta_var(MERGE_BLOCK_SIZE)
        with self.isa.launch(grid, *size, waits=False) as (blocks, thread):
            block = T.meta_var(blocks[0])
            lane = T.truncmod(thread, WARP)
            row = blocks[1] * MERGED_ROWS + T.truncdiv(thread, WARP)
            work = self.of_block((block, 0))
            rows = QueryRows(self.spec, self.tiling, work)
            work.find_cut(lane)
            self.isa.wait_for_kernels_before()
            if T.And(work.begins_in_split(), row < self.tiling.rows):
                if rows.exists(row):
                    slot_of = T.meta_var(lambda i: (self.slot(block + i, i > 0), row))
                    self.merge(self.a, slot_of, work.num_splits(), rows.index(row), lane)
