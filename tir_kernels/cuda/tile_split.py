# SPDX-License-Identifier: Apache-2.0
"""The tiles of shared segments over their positions, cut into equal shares on the device.

A tile is some rows of a segment for one KV head, and a unit one block of the segment's positions
for it. The units of a step stand in the order of segments, heads, tiles and positions, so that
tiles over the same K and V come together, and every block takes as many.
"""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace

from tvm.script import tirx as T

from ..spec import KernelSpec
from .emit import index_temp
from .rows import as_int64
from .schedule import UnitOfBlock, sum_over
from .tiling import Tiling

LEAST_UNITS = 2  # of a share: copies of one block of positions pass while another is multiplied


@dataclass(frozen=True)
class Tile:
    """Rows of a segment for one KV head.

    Parameters
    ----------
    a : the kernel's arguments.
    segment, head : int32 expressions
    first_row, num_rows : int32 expressions
        Of the segment in `row_ids`.
    first : int32 expression
        First row of the tile, counted in rows of the segment times heads of the group.
    begin, end : int32 expressions
        Its units in the step.
    group : int
        Query heads of a KV head.
    """

    a: SimpleNamespace
    segment: object
    head: object
    first_row: object
    num_rows: object
    first: object
    begin: object
    end: object
    group: int

    def is_there(self, row):
        """Whether a row of the tile is one of the segment."""
        return self.first + row < self.num_rows * self.group

    def output_row(self, row) -> tuple:
        """Index of a row of the tile in O and its logs."""
        at = self.first + row
        row_id = self.a.row_ids[self.first_row + T.truncdiv(at, self.group)]
        return as_int64(row_id), self.head * self.group + T.truncmod(at, self.group)


class TileSplit:
    """The shares of a step, as a block sees them.

    Parameters
    ----------
    spec : KernelSpec
    tiling : Tiling
    a : the kernel's arguments `row_indptr`, `row_ids`, `page_indptr`, `first_segment` and
        `last_segment`.
    num_blocks : int32 expression
        That share the units.
    lane : int32 expression
    """

    def __init__(self, spec: KernelSpec, tiling: Tiling, a, num_blocks, lane):
        self.spec, self.tiling, self.a = spec, tiling, a
        self.count = index_temp(a.last_segment - a.first_segment)
        self.total = index_temp(sum_over(self.count, self.units_of, lane))
        share = T.truncdiv(self.total + num_blocks - 1, num_blocks)
        self.share = index_temp(T.max(share, LEAST_UNITS))

    def _extent(self, indptr, i):
        at = self.a.first_segment + i
        return indptr[at + 1] - indptr[at]

    def kv_len(self, i):
        """Positions of the i-th segment."""
        return self._extent(self.a.page_indptr, i) * self.spec.page_size

    def _num_tiles(self, i):
        rows = self._extent(self.a.row_indptr, i) * self.spec.group_size
        return T.truncdiv(rows + self.tiling.rows - 1, self.tiling.rows)

    def _units_of_tile(self, i):
        positions = self.tiling.positions
        return T.truncdiv(self.kv_len(i) + positions - 1, positions)

    def units_of(self, i):
        """Units of the i-th segment."""
        return self._num_tiles(i) * self.spec.num_kv_heads * self._units_of_tile(i)

    def owner(self, at, lane) -> UnitOfBlock:
        """The segment of a unit, as `sequence`, and which of its units it is, as `index`."""
        return UnitOfBlock(at, self.count, self.units_of, lane)

    def pair(self, owner, at) -> Tile:
        """The tile of a unit, whose owner has `sequence` and `index`."""
        i = owner.sequence
        units = index_temp(self._units_of_tile(i))
        number = index_temp(T.truncdiv(owner.index, units))
        num_tiles = index_temp(self._num_tiles(i))
        begin = index_temp(at - owner.index + number * units)
        segment = index_temp(self.a.first_segment + i)
        return Tile(
            a=self.a,
            segment=segment,
            head=index_temp(T.truncdiv(number, num_tiles)),
            first_row=index_temp(self.a.row_indptr[segment]),
            num_rows=index_temp(self._extent(self.a.row_indptr, i)),
            first=index_temp(T.truncmod(number, num_tiles) * self.tiling.rows),
            begin=begin,
            end=index_temp(begin + units),
            group=self.spec.group_size,
        )
