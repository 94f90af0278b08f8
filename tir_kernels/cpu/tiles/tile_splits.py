# SPDX-License-Identifier: Apache-2.0
"""Tiles of rows whose positions are cut among tasks.

Every task takes one split, which is as much of all (tile, position) work as any other, so that one
tile with many positions uses every thread. The positions of a sequence are segments that begin at
multiples of a number of KV tiles, which its length decides; a split has the segments that begin in
it. A tile whose segments are in one split is finished there; one that is cut leaves partial states,
which are merged in the same call, in the order of positions.
"""

from tvm.script import tirx as T

from ...script import inline
from ..softmax.output import finish
from ..tasks import Workspace, cut, num_threads
from .kv_tile import POSITIONS

SERIAL_WORK = 1 << 20  # multiply-adds below which a launch costs more than it saves
# Positions of a segment. Rows have much more to merge for their positions than those of decode.
SEGMENT = 1024
MAX_SEGMENTS = 128  # of a sequence: those of longer ones are longer


def segment_of(kv_len):
    """Return the KV tiles of a segment of a sequence, int32."""
    most = SEGMENT * MAX_SEGMENTS
    return T.max((kv_len + most - 1) // most, 1) * (SEGMENT // POSITIONS)


@T.meta_class
class TileSplits:
    """The cost of all tiles, and its splits.

    The cost of a tile is its KV tiles times its tokens, in 64 bits: a million rows on a
    million positions make 2**34.

    Parameters
    ----------
    cost_work : int
        Multiply-adds that a cost of 1 stands for.
    """

    def __init__(self, cost_work: int):
        self.cost_work = cost_work
        self.total = T.local_scalar("int64")
        self.num_tasks = T.local_scalar("int32")

    @inline
    def plan(self, tiles):
        """Add up the tiles, and decide about the number of tasks: one where there is little."""
        tiles.begin()
        while tiles.has_next():
            tiles.advance()
        self.total = tiles.before
        max_tasks = T.min(T.cast(num_threads(), "int64"), self.total)
        is_large = T.meta_var(self.total * self.cost_work > SERIAL_WORK)
        self.num_tasks = T.if_then_else(is_large, T.cast(max_tasks, "int32"), 1)

    def begin(self, task):
        """The cost at which the split of a task begins."""
        return cut(self.total, task, self.num_tasks, "int64")


@T.meta_class
class Split:
    """The split of a task, and the segments of one tile that it has.

    Attributes
    ----------
    first_kv_tile, last_kv_tile : int32
        The KV tiles ``first_kv_tile .. last_kv_tile - 1`` of the tile are those of its segments.
    num_kv_tiles, segment : int32
        KV tiles of the tile, and of a segment.
    """

    def __init__(self, splits: TileSplits):
        self.splits = splits
        self.first, self.last, self.begin, self.end = (T.local_scalar("int64") for _ in range(4))
        self.first_kv_tile, self.last_kv_tile = (T.local_scalar("int32") for _ in range(2))
        self.num_kv_tiles, self.segment, self.before = (T.local_scalar("int32") for _ in range(3))

    @inline
    def take(self, task):
        """Take the split of a task."""
        self.first = self.splits.begin(task)
        self.last = self.splits.begin(task + 1)

    @inline
    def enter(self, tile):
        """Find the part of a tile, and its segments."""
        self.begin = T.max(self.first - tile.before, T.int64(0))
        self.end = T.max(T.min(self.last - tile.before, tile.cost), self.begin)
        end_kv_tile = (tile.end + POSITIONS - 1) // POSITIONS
        self.num_kv_tiles = T.max(end_kv_tile - tile.first_kv_tile, 0)
        self.segment = segment_of(tile.kv_len)
        self.before = tile.first_kv_tile % self.segment
        self.first_kv_tile = self._begin_of_segment(_kv_tile_of(self.begin, tile))
        self.last_kv_tile = self._begin_of_segment(_kv_tile_of(self.end, tile))

    def _begin_of_segment(self, kv_tile):
        """Return where the first segment begins that does not begin before a KV tile."""
        end = (self.before + kv_tile + self.segment - 1) // self.segment * self.segment
        return T.min(T.if_then_else(kv_tile == 0, 0, end - self.before), self.num_kv_tiles)

    @property
    def num_segments(self):
        """Return the number of segments; a tile that sees nothing has one."""
        end = self.before + self.last_kv_tile + self.segment - 1
        count = end // self.segment - (self.before + self.first_kv_tile) // self.segment
        is_first = T.And(self.begin == 0, self.end > 0)
        return T.max(
            T.if_then_else(self.first_kv_tile < self.last_kv_tile, count, 0),
            T.cast(is_first, "int32"),
        )

    def begin_of(self, i):
        """Return the first KV tile of a segment; the one after the last is `last_kv_tile`."""
        begin = (self.before + self.first_kv_tile) // self.segment + i
        begin = begin * self.segment - self.before
        return T.max(T.min(begin, self.last_kv_tile), self.first_kv_tile)

    @property
    def is_only(self):
        """Whether the tile has a single segment."""
        return self.before + self.num_kv_tiles <= self.segment

    @property
    def is_whole(self):
        """Whether the task has all segments of the tile."""
        return T.And(self.begin == 0, self.last_kv_tile == self.num_kv_tiles)


def _kv_tile_of(cost, tile):
    return T.cast((cost + tile.num_tokens - 1) // tile.num_tokens, "int32")


@T.meta_class
class TileSlots:
    """The slots of `PartialStates` that tasks use.

    A task has one for the tile that it is at, from its first segment on. The segments with which it
    continues a tile that an earlier task began have one each, after that.

    Attributes
    ----------
    num_tile_slots : int32
    """

    def __init__(self, splits: TileSplits):
        self.splits = splits
        self._memory = Workspace(splits.num_tasks + 1, (1,), "int32", "numbers of slots")
        self._first = self._memory.buffer
        self.num_tile_slots = T.local_scalar("int32")

    @inline
    def begin(self, tile):
        """Count the slots; `tile` iterates over the tiles."""
        split, first = Split(self.splits), T.meta_var(self._first)
        tile.begin()
        self.num_tile_slots = 0
        for task in range(self.splits.num_tasks):
            first[T.cast(task, "int64"), 0] = self.num_tile_slots
            self.num_tile_slots += 1
            split.take(task)
            while T.And(tile.has_next(), tile.before + tile.cost <= split.first):
                tile.advance()
            if T.And(tile.has_next(), tile.before < split.first):
                split.enter(tile)
                self.num_tile_slots += split.num_segments
        first[T.cast(self.splits.num_tasks, "int64"), 0] = self.num_tile_slots

    @inline
    def free(self):
        """Give the memory back."""
        self._memory.free()

    def first(self, task):
        """Return the first slot of a task."""
        return self._first[T.cast(task, "int64"), 0]


@T.meta_class
class CutTile:
    """The tasks that have parts of a tile: `count` from `first` on."""

    def __init__(self, splits: TileSplits, slots: TileSlots):
        self.splits, self.slots = splits, slots
        self.first, self.count = (T.local_scalar("int32") for _ in range(2))

    @inline
    def merge(self, task, tile, states, rope, output):
        """Finish some rows of every tile that was cut: those of one of the tasks."""
        num_tasks, slots = T.meta_var((self.splits.num_tasks, self.slots))
        self.first = 0
        tile.begin()
        while tile.has_next():
            self._find(tile)
            if self._is_cut():
                begin = cut(tile.num_rows, task, num_tasks)
                for row in range(begin, cut(tile.num_rows, task + 1, num_tasks)):
                    at = T.meta_var(states.at(slots.first(self.first), row))
                    for other in range(self.first + 1, self.first + self.count):
                        for slot in range(slots.first(other) + 1, slots.first(other + 1)):
                            states.add(at, *states.result(states.at(slot, row)))
                    rows = T.meta_var((tile.token(row), tile.query_head(row)))
                    finish(rope, output, *rows, *states.result(at))
            tile.advance()

    def _is_cut(self):
        """Whether other tasks than the first one have segments of the tile."""
        end, others = self.first + self.count, self.count - 1
        return self.slots.first(end) - self.slots.first(self.first + 1) > others

    @inline
    def _find(self, tile):
        """Find the tasks of a tile, which comes behind the one before."""
        while self.splits.begin(self.first + 1) <= tile.before:
            self.first += 1
        self.count = 1
        while self.splits.begin(self.first + self.count) < tile.before + tile.cost:
            self.count += 1
