# SPDX-License-Identifier: Apache-2.0
"""The work of the blocks that have tiles of rows: which tile, and which of its positions.

An item is a sequence, or a segment that sequences share. A tile is some of its rows for one KV
head. Nothing is planned on the host: a block finds its work from the starts of the items. There are
two ways to share out tiles that are too few, or whose positions are too many, for a block each:

`FixedSplits`
    All tiles are cut into equally many splits of what their rows see. Masks leave tiles with
    different numbers of columns, and the GPU gives blocks to multiprocessors as these become free.
`BalancedSplits`
    As many blocks as the GPU holds take equally many positions of the tiles in a row. This is for
    rows that all see about the whole item, of which there may be few with very different lengths.

Both have the interface of a loop: ``work.begin(lane)``, ``while work.has_next(): work.next()``.
Then `item`, `head`, `slice` (of the columns of V), `first_row` and `num_rows` (of the item),
`first` (row of the tile, in rows times heads of the group) and `kv_len` say which tile it is;
``work.clip(mask)`` leaves a mask the columns of the split; `is_whole` says whether these are all,
and ``work.state_index(rows, row)`` where the partial state of a row belongs if they are not.
"""

from __future__ import annotations

from dataclasses import dataclass

from tvm import tirx
from tvm.script import tirx as T

from ...script import inline
from ...spec import KernelSpec
from ..emit import I32, I64, WARP, as_count, count_temp, index_temp, launch, sync_block
from ..launcher import resident_blocks
from ..splits.work_item import WorkItem, sum_over
from ..tiles.tiling import Tiling
from .kv_rows import as_int64
from .partial_states import MERGED_ROWS, MIN_BLOCKS_OF_MERGE, BlockStates, PartialStates

MIN_COLUMNS = 256  # that a block takes: loading Q, keeping states and merging them costs as much
MIN_KV_TILES = 2  # of a split: one is copied while another is multiplied


@dataclass(frozen=True)
class Sequences:
    """The items of a batch of sequences.

    Parameters
    ----------
    q_indptr, kv_indptr : int32 Buffers
        Where the rows and the pages, or the rows of ragged K and V, of a sequence begin.
    kv_len_of : callable
        Sequence -> its number of positions.
    count : int32 expression
    """

    q_indptr: object
    kv_indptr: object
    kv_len_of: object
    count: object
    are_all_visited = True  # rows that see nothing are written, too

    def number(self, i):
        """Return the index of item i in arrays of items."""
        return i

    def first_row(self, i):
        """Return where the rows of item i begin in Q."""
        return self.q_indptr[i]

    def num_rows(self, i):
        """Return the number of rows of item i."""
        return self.q_indptr[i + 1] - self.q_indptr[i]

    def kv_len(self, i):
        """Return the number of positions of item i."""
        return self.kv_len_of(i)

    def row_id(self, at):
        """Return the row of Q and O, of a row counted as `first_row` does."""
        return at


@dataclass(frozen=True)
class Segments:
    """The segments that a call is for; their pages are full, and their rows are a list.

    Parameters
    ----------
    row_indptr, row_ids : the kernel's arguments
    kv_indptr : int32 Buffer
        Where the pages of a segment begin.
    first, last : int32 expressions
        Segments ``first .. last - 1``.
    page_size : int
    """

    row_indptr: object
    row_ids: object
    kv_indptr: object
    first: object
    last: object
    page_size: int
    are_all_visited = False

    @property
    def count(self):
        """Return the number of segments."""
        return self.last - self.first

    def number(self, i):
        """Return the index of item i in arrays of segments."""
        return self.first + i

    def first_row(self, i):
        """Return where the rows of item i begin in `row_ids`."""
        return self.row_indptr[self.first + i]

    def num_rows(self, i):
        """Return the number of rows of item i."""
        return self.row_indptr[self.first + i + 1] - self.row_indptr[self.first + i]

    def kv_len(self, i):
        """Return the number of positions of item i."""
        at = self.first + i
        return (self.kv_indptr[at + 1] - self.kv_indptr[at]) * self.page_size

    def row_id(self, at):
        """Return the row of Q and O of an entry of `row_ids`."""
        return self.row_ids[at]


@T.meta_class
class FixedSplits:
    """A block takes one tile of rows, and one of the splits of the columns that these see.

    Of a sequence the last rows, which see most, come first.

    Parameters
    ----------
    spec : KernelSpec
    tiling : Tiling
    items : Sequences
    blocks : tuple of int32 expressions
        The tile, the KV head and slice of V, and the split of the block.
    splits : int32 expression
    """

    def __init__(self, spec: KernelSpec, tiling: Tiling, items: Sequences, blocks, splits):
        self.tiling, self.items, self.splits = tiling, items, splits
        self.group = spec.group_size
        self.number, self.pair, self.split = blocks
        self.slice = T.truncmod(self.pair, tiling.slices)
        self.is_whole = splits == 1
        self.left, self.item, self.head, self.first = (T.local_scalar(I32) for _ in range(4))
        self.first_row, self.num_rows, self.kv_len = (T.local_scalar(I32) for _ in range(3))

    @property
    def variables(self) -> tuple:
        """Return the variables that say which tile it is."""
        return self.head, self.first, self.first_row, self.num_rows, self.kv_len

    def _tiles_of(self, i):
        rows = self.items.num_rows(i) * self.group
        return T.truncdiv(rows + self.tiling.rows - 1, self.tiling.rows)

    @inline
    def begin(self, lane):
        """Find the tile of the block; there may be none."""
        found = T.meta_var(WorkItem(self.number, self.items.count, self._tiles_of, lane))
        self.item = found.sequence
        self.first = (found.count - 1 - found.index) * self.tiling.rows
        self.left = T.cast(self.item >= 0, I32)

    def has_next(self):
        """Whether there is work left."""
        return self.left > 0

    @inline
    def next(self):
        """Go on with the next tile."""
        self.left = 0
        self.head = T.truncdiv(self.pair, self.tiling.slices)
        self.first_row = self.items.first_row(self.item)
        self.num_rows = self.items.num_rows(self.item)
        self.kv_len = self.items.kv_len(self.item)

    @inline
    def clip(self, mask):
        """Leave the columns of the split to a mask that has `start` and `end` of all of them."""
        mask.start = T.min(mask.start, mask.end)  # it may be as large as numbers are
        tiles = T.meta_var(T.ceildiv(mask.end - mask.start, self.tiling.positions))
        size = T.truncdiv(tiles + self.splits - 1, self.splits)
        size = T.max(size * self.tiling.positions, MIN_COLUMNS)
        mask.start = mask.start + self.split * size
        mask.end = T.min(mask.end, mask.start + size)

    def state_index(self, rows, row) -> tuple:
        """Return where the partial state of a row is."""
        return (self.split, *rows.index(row))


@T.meta_class
class BalancedSplits:
    """A block takes as many KV tiles as any other; they may be of several tiles of rows.

    A KV tile is a tile of positions, for a tile of rows. The KV tiles of a step stand in the order
    of items, heads, tiles of rows and positions, so that tiles over the same K and V come together.

    Parameters
    ----------
    spec : KernelSpec
    tiling : Tiling
    items : Sequences or Segments
    blocks : tuple of int32 expressions
        The block, and its slice of V.
    num_blocks : int32 expression
        That share the KV tiles.
    states : BlockStates
    """

    def __init__(
        self, spec: KernelSpec, tiling: Tiling, items, blocks, num_blocks, states: BlockStates
    ):
        self.tiling, self.items, self.states = tiling, items, states
        self.group, self.num_kv_heads = spec.group_size, spec.num_kv_heads
        self.block, self.slice = blocks
        self.num_blocks = num_blocks
        self.count, self.left, self.item, self.head = (T.local_scalar(I32) for _ in range(4))
        self.total, self.split_size, self.index = (T.local_scalar(I64) for _ in range(3))
        self.first, self.first_row, self.num_rows = (T.local_scalar(I32) for _ in range(3))
        self.kv_len, self.start, self.end = (T.local_scalar(I32) for _ in range(3))
        self.slot, self.whole = (T.local_scalar(I32) for _ in range(2))

    @property
    def variables(self) -> tuple:
        """Return the variables that say which tile it is, and where its state is."""
        tile = self.head, self.first, self.first_row, self.num_rows, self.kv_len
        return *tile, self.slot, self.whole

    @property
    def is_whole(self):
        """Whether the block sees all columns of the tile."""
        return self.whole != 0

    def _num_tiles(self, i):
        rows = self.items.num_rows(i) * self.group
        return T.truncdiv(rows + self.tiling.rows - 1, self.tiling.rows)

    def _kv_tiles_of_tile(self, i):
        positions = self.tiling.positions
        num_kv_tiles = T.truncdiv(self.items.kv_len(i) + positions - 1, positions)
        return T.max(num_kv_tiles, 1) if self.items.are_all_visited else num_kv_tiles

    def kv_tiles_of(self, i):
        """Return the KV tiles of item i, an int64."""
        return as_count(self._num_tiles(i) * self.num_kv_heads) * self._kv_tiles_of_tile(i)

    @inline
    def cut(self, lane):
        """Find how many KV tiles there are, and how many of them a block takes."""
        self.count = self.items.count
        self.total = sum_over(self.count, self.kv_tiles_of, lane)
        size = T.truncdiv(self.total + self.num_blocks - 1, as_count(self.num_blocks))
        self.split_size = T.max(size, T.int64(MIN_KV_TILES))

    @inline
    def begin(self, lane):
        """Find the first KV tile of the block."""
        self.cut(lane)
        first = as_count(self.block) * self.split_size
        # What a block takes fits into 32 bits, and registers are scarce.
        left = T.meta_var(T.max(T.min(self.split_size, self.total - first), T.int64(0)))
        self.left = T.cast(left, I32)
        if self.left > 0:
            owner = T.meta_var(self.owner(first, lane))
            self.item = owner.sequence
            self.index = owner.index

    def has_next(self):
        """Whether there is work left."""
        return self.left > 0

    @inline
    def next(self):
        """Go on with the next tile: the end of one, whole ones, and the beginning of another."""
        sync_block()  # none reads any more what the tile before left in shared memory
        while self.index >= self.kv_tiles_of(self.item):
            self.index = self.index - self.kv_tiles_of(self.item)
            self.item = self.item + 1
        num_kv_tiles = self._kv_tiles_of_tile(self.item)
        number = self._number(self.index, num_kv_tiles)
        begin = T.cast(self.index - as_count(number) * num_kv_tiles, I32)
        count = T.min(num_kv_tiles - begin, self.left)
        self.left = self.left - count
        self.index = self.index + as_count(count)
        self.kv_len = self.items.kv_len(self.item)
        self.start = begin * self.tiling.positions
        self.end = T.min((begin + count) * self.tiling.positions, self.kv_len)
        self.whole = T.cast(count == num_kv_tiles, I32)
        self.slot = self.states.slot(self.block, begin > 0)
        num_tiles = self._num_tiles(self.item)
        self.head = T.truncdiv(number, num_tiles)
        self.first = T.truncmod(number, num_tiles) * self.tiling.rows
        self.first_row = self.items.first_row(self.item)
        self.num_rows = self.items.num_rows(self.item)

    @inline
    def clip(self, mask):
        """Leave the columns of the split to a mask that has `start` and `end` of all of them."""
        mask.start = T.max(mask.start, self.start)
        mask.end = T.min(mask.end, self.end)

    def state_index(self, rows, row) -> tuple:
        """Return where the partial state of a row is."""
        return self.slot, row

    # --- what the merge of the states asks for --------------------------------------------------

    def owner(self, at, lane) -> WorkItem:
        """The item of a KV tile, as `sequence`, and which of the item's it is, as `index`."""
        return WorkItem(at, self.count, self.kv_tiles_of, lane, I64)

    @staticmethod
    def _number(index, num_kv_tiles):
        """The tile of an item that KV tile `index` of the item belongs to."""
        return T.cast(T.truncdiv(index, as_count(num_kv_tiles)), I32)

    def pair(self, owner, at) -> CutTile:
        """The tile of a KV tile, whose owner has `sequence` and `index`."""
        item = owner.sequence
        num_kv_tiles = index_temp(self._kv_tiles_of_tile(item))
        number = index_temp(self._number(owner.index, num_kv_tiles))
        begin = count_temp(at - owner.index + as_count(number) * num_kv_tiles)
        num_tiles = index_temp(self._num_tiles(item))
        return CutTile(
            work=self,
            head=index_temp(T.truncdiv(number, num_tiles)),
            first_row=index_temp(self.items.first_row(item)),
            num_rows=index_temp(self.items.num_rows(item)),
            first=index_temp(T.truncmod(number, num_tiles) * self.tiling.rows),
            begin=begin,
            end=count_temp(begin + num_kv_tiles),
        )


@dataclass(frozen=True, kw_only=True)
class CutTile:
    """A tile of rows of which several blocks have partial states.

    Parameters
    ----------
    work : BalancedSplits
    head, first_row, num_rows, first : int32 expressions
        As in `work`.
    begin, end : int64 expressions
        Its KV tiles in the step.
    """

    work: BalancedSplits
    head: object
    first_row: object
    num_rows: object
    first: object
    begin: object
    end: object

    def has_row(self, row):
        """Whether a row of the tile is one of the item."""
        return self.first + row < self.num_rows * self.work.group

    def output_row(self, row) -> tuple:
        """Return the index of a row of the tile in O and its logs."""
        group, at = self.work.group, self.first + row
        row_id = self.work.items.row_id(self.first_row + T.truncdiv(at, group))
        return as_int64(row_id), self.head * group + T.truncmod(at, group)


# ---- On the host -------------------------------------------------------------------------------


def splits_of(tiling: Tiling, num_tiles, num_positions):
    """Return how many blocks split the columns of each tile, at least one.

    Parameters
    ----------
    tiling : Tiling
    num_tiles : int32 expression
    num_positions : integer expression
        No sequence has more of them; known to the host.
    """
    resident = resident_blocks(tiling.num_bytes, tiling.min_blocks)
    max_splits = T.cast(T.truncdiv(num_positions + MIN_COLUMNS - 1, MIN_COLUMNS), I32)
    splits = T.max(T.min(T.truncdiv(resident, T.max(num_tiles, 1)), max_splits), 1)
    return T.bind(splits, var=tirx.Var("splits", I32))


class FixedWork(PartialStates):
    """The grid of blocks with `FixedSplits`, and a state of each row for each of the splits.

    Parameters
    ----------
    spec : KernelSpec
    tiling : Tiling
    a : the kernel's arguments.
    items : Sequences
    num_positions : integer expression
        As `splits_of` takes it.
    """

    def __init__(self, spec: KernelSpec, tiling: Tiling, a, items: Sequences, num_positions):
        self.tiling, self.a, self.items = tiling, a, items
        # An upper bound: each sequence has at most one partial tile.
        max_tiles = T.truncdiv(a.q.shape[0] * spec.group_size, tiling.rows) + items.count
        pairs = spec.num_kv_heads * tiling.slices
        self.splits = splits_of(tiling, max_tiles * pairs, num_positions)
        self.grid = [max_tiles, pairs, self.splits]
        num_states = T.if_then_else(self.splits > 1, self.splits, 0)
        super().__init__(spec, (num_states, T.cast(a.q.shape[0], I32), spec.num_qo_heads))

    def of_block(self, blocks) -> FixedSplits:
        """Return the work of a block of the grid."""
        return FixedSplits(self.spec, self.tiling, self.items, blocks, self.splits)

    def launch_merge(self) -> None:
        """Merge the states of the rows that sequences have; with one split there are none."""
        num_heads = self.spec.num_qo_heads
        blocks = T.ceildiv(T.cast(self.a.q.shape[0], I32) * num_heads, MERGED_ROWS)
        with T.If(self.splits > 1), T.Then():
            with launch([blocks], MERGED_ROWS * WARP, MIN_BLOCKS_OF_MERGE) as ((block,), thread):
                lane = index_temp(T.truncmod(thread, WARP))
                at = index_temp(block * MERGED_ROWS + T.truncdiv(thread, WARP))
                row = index_temp(T.truncdiv(at, num_heads))
                head = index_temp(T.truncmod(at, num_heads))
                with T.If(row < self.items.first_row(self.items.count)), T.Then():
                    output = as_int64(row), head
                    self.merge(self.a, lambda i: (i, *output), self.splits, output, lane)


class BalancedWork(BlockStates):
    """The grid of blocks with `BalancedSplits`, and two states of rows for each of them.

    Parameters
    ----------
    spec, tiling, a : see `FixedWork`
    items : Sequences or Segments
    is_continued : bool
        As `BlockStates` takes it.
    """

    def __init__(self, spec: KernelSpec, tiling: Tiling, a, items, is_continued: bool):
        self.tiling, self.a, self.items = tiling, a, items
        num_blocks = resident_blocks(tiling.num_bytes, tiling.min_blocks, tiling.slices)
        self.grid = [num_blocks, tiling.slices]
        super().__init__(spec, num_blocks, tiling.rows, is_continued)

    def of_block(self, blocks) -> BalancedSplits:
        """Return the work of a block of the grid."""
        arguments = self.spec, self.tiling, self.items, blocks
        return BalancedSplits(*arguments, self.num_blocks, self)

    def launch_merge(self) -> None:
        """Merge the states of the tiles that were cut."""

        def schedule_of(lane) -> BalancedSplits:
            work = self.of_block((None, None))
            work.cut(lane)
            return work

        super().launch_merge(self.a, schedule_of)
