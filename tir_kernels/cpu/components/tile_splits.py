# SPDX-License-Identifier: Apache-2.0
"""Tiles of rows whose positions are cut among tasks.

Every task takes one split, which is as much of all (tile, position) work as any other, so that one
tile with many positions uses every thread. A tile that falls into one split is finished there; one
that is cut leaves partial states, which are merged in the same call.
"""

from tvm.script import tirx as T

from ...script import inline
from .work import cut, num_threads

SERIAL_WORK = 1 << 20  # multiply-adds below which a launch costs more than it saves


@T.meta_class
class TileSplits:
    """The cost of all tiles, and its splits.

    The cost of a tile is its blocks of positions times its tokens, in 64 bits: a million rows on a
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
    """The split of a task, and the part of one tile that falls into it: ``begin .. end - 1``."""

    def __init__(self, splits: TileSplits):
        self.splits = splits
        self.first, self.last, self.begin, self.end = (T.local_scalar("int64") for _ in range(4))
        self.first_block, self.last_block = (T.local_scalar("int32") for _ in range(2))

    @inline
    def take(self, task):
        """Take the split of a task."""
        self.first = self.splits.begin(task)
        self.last = self.splits.begin(task + 1)

    @inline
    def enter(self, tile):
        """Find the part of a tile, and its blocks of positions."""
        self.begin = T.max(self.first - tile.before, T.int64(0))
        self.end = T.min(self.last - tile.before, tile.cost)
        self.first_block = _block_of(self.begin, tile)
        self.last_block = _block_of(self.end, tile)

    def has_some(self):
        """Whether the task has a part of the tile, which may lie within a block."""
        return self.begin < self.end

    def is_whole(self, tile):
        """Whether the task has all of the tile."""
        return T.And(self.begin == 0, self.end == tile.cost)


def _block_of(cost, tile):
    return T.cast((cost + tile.num_tokens - 1) // tile.num_tokens, "int32")


@T.meta_class
class CutTile:
    """The tasks that have parts of a tile: `count` from `first` on."""

    def __init__(self, splits: TileSplits):
        self.splits = splits
        self.first, self.count = (T.local_scalar("int32") for _ in range(2))

    @inline
    def merge(self, task, tile, states, output):
        """Finish some rows of every tile that was cut: those of one of the tasks."""
        num_tasks = T.meta_var(self.splits.num_tasks)
        self.first = 0
        tile.begin()
        while tile.has_next():
            self._find(tile)
            if self.count > 1:
                begin = cut(tile.num_rows, task, num_tasks)
                for row in range(begin, cut(tile.num_rows, task + 1, num_tasks)):
                    at = T.meta_var((tile.token(row), tile.query_head(row)))
                    states.merge(self.first, self.count, row, output, *at)
            tile.advance()

    @inline
    def _find(self, tile):
        """Find the tasks of a tile, which comes behind the one before."""
        while self.splits.begin(self.first + 1) <= tile.before:
            self.first += 1
        self.count = 1
        while self.splits.begin(self.first + self.count) < tile.before + tile.cost:
            self.count += 1
