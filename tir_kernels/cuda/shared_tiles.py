# SPDX-License-Identifier: Apache-2.0
"""Tiles of rows in shared memory, laid out so that eight rows of a matrix lie in different banks.

A row is a number of chunks of 16 bytes. Where it has a multiple of eight, chunk c of row r lies at
``c ^ (r & 7)``; any other row gets an odd number of chunks. Either way the chunks of one column in
eight consecutive rows take all 32 banks once, for the copies in and for `ldmatrix`.
"""

from __future__ import annotations

from dataclasses import dataclass

from tvm.script import tirx as T

CHUNK_BYTES = 16
BANK_ROWS = 8


@dataclass(frozen=True)
class TileLayout:
    """The layout of a tile.

    Parameters
    ----------
    rows : int
    width : int
        Elements of a row, a multiple of a chunk.
    itemsize : int
        Bytes of an element.
    """

    rows: int
    width: int
    itemsize: int = 2

    @property
    def per_chunk(self) -> int:
        """Elements of a chunk."""
        return CHUNK_BYTES // self.itemsize

    @property
    def chunks(self) -> int:
        """Chunks of a row that hold something."""
        return self.width // self.per_chunk

    @property
    def is_swizzled(self) -> bool:
        """Whether chunks change places; else rows are padded."""
        return self.chunks % BANK_ROWS == 0

    @property
    def stride(self) -> int:
        """Elements from a row to the next."""
        return (self.chunks if self.is_swizzled else self.chunks | 1) * self.per_chunk

    @property
    def size(self) -> int:
        """Elements of the tile."""
        return self.rows * self.stride

    def offset(self, row, chunk):
        """Element at which a chunk of a row begins."""
        if self.is_swizzled:
            chunk = T.bitwise_xor(chunk, T.bitwise_and(row, BANK_ROWS - 1))
        return row * self.stride + chunk * self.per_chunk


class SharedTiles:
    """Tiles of one layout, one after the other in a shared array.

    Parameters
    ----------
    memory : Buffer in the scope "shared.dyn"
    begin : int
        Element at which the first one begins.
    layout : TileLayout
    count : int
    """

    def __init__(self, memory, begin: int, layout: TileLayout, count: int = 1):
        self.memory, self.begin, self.layout, self.count = memory, begin, layout, count

    @property
    def end(self) -> int:
        """Element behind the last one."""
        return self.begin + self.count * self.layout.size

    def index(self, tile, row, chunk):
        """Element of the array at which a chunk begins."""
        return self.begin + tile * self.layout.size + self.layout.offset(row, chunk)

    def pointer(self, tile, row, chunk):
        """Where a chunk begins."""
        return self.memory.ptr_to([self.index(tile, row, chunk)])
