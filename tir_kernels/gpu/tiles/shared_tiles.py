# SPDX-License-Identifier: Apache-2.0
"""Tiles of rows in shared memory, laid out so that eight rows of a matrix lie in different banks.

A row is a number of chunks of 16 bytes. Where it has a multiple of eight, chunk c of row r lies at
``c ^ (r & 7)``; any other row gets an odd number of chunks. Either way the chunks of one column in
eight consecutive rows take all 32 banks once, for the copies in and for `ldmatrix`.
"""

from __future__ import annotations

from dataclasses import dataclass

from tvm.script import tirx as T

from ...spec import STORED_ITEMSIZE
from ..registers import F32, U32, Registers, index_temp

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
    dtype : str
        Of the elements.
    """

    rows: int
    width: int
    dtype: str

    @property
    def per_chunk(self) -> int:
        """Elements of a chunk."""
        return CHUNK_BYTES // STORED_ITEMSIZE[self.dtype]

    @property
    def chunks(self) -> int:
        """Chunks of a row that hold something."""
        return self.width // self.per_chunk

    @property
    def is_swizzled(self) -> bool:
        """Whether chunks are swizzled; else rows are padded."""
        return self.chunks % BANK_ROWS == 0

    @property
    def stride(self) -> int:
        """Bytes from a row to the next."""
        return (self.chunks if self.is_swizzled else self.chunks | 1) * CHUNK_BYTES

    @property
    def num_bytes(self) -> int:
        """Return the size of the tile in bytes."""
        return self.rows * self.stride

    def offset(self, row, chunk):
        """Byte at which a chunk of a row begins."""
        if self.is_swizzled:
            chunk = T.bitwise_xor(chunk, T.bitwise_and(row, BANK_ROWS - 1))
        return row * self.stride + chunk * CHUNK_BYTES


class SlabLayout(TileLayout):
    """The layout that matrix instructions of four warps read: slabs of 128 bytes of each row.

    Chunks are swizzled within a slab, the "128-byte swizzle" of the PTX ISA. Tiles begin at
    multiples of 1 KiB.
    """

    @property
    def stride(self) -> int:
        """Bytes from a row to the next, in a slab."""
        return BANK_ROWS * CHUNK_BYTES

    @property
    def slab_bytes(self) -> int:
        """Bytes from a slab to the next."""
        return self.rows * self.stride

    @property
    def num_bytes(self) -> int:
        """Return the size of the tile in bytes."""
        return self.chunks // BANK_ROWS * self.slab_bytes

    def offset(self, row, chunk):
        """Byte at which a chunk of a row begins."""
        slab, chunk = T.truncdiv(chunk, BANK_ROWS), T.truncmod(chunk, BANK_ROWS)
        chunk = T.bitwise_xor(chunk, T.bitwise_and(row, BANK_ROWS - 1))
        return slab * self.slab_bytes + row * self.stride + chunk * CHUNK_BYTES


@T.meta_class
class SharedTiles:
    """Tiles of one layout, one after the other in shared memory.

    Parameters
    ----------
    memory : SharedMemory
    begin : int
        Byte at which the first one begins.
    layout : TileLayout
    count : int
    first_chunk : int or int32 expression
        Chunk of a row that is taken for its first one: a multiple of eight.
    tile_bytes : int, optional
        From a tile to the next one, where there is something else in between.
    """

    def __init__(
        self,
        memory,
        begin: int,
        layout: TileLayout,
        count: int = 1,
        first_chunk=0,
        tile_bytes: int | None = None,
    ):
        self.memory, self.isa = memory, memory.isa
        self.begin, self.layout, self.count = begin, layout, count
        self.first_chunk, self.tile_bytes = first_chunk, tile_bytes or layout.num_bytes

    def from_chunk(self, chunk) -> SharedTiles:
        """Return the same tiles, with a later chunk, a multiple of eight, as their first one."""
        first_chunk = self.first_chunk + chunk
        return SharedTiles(
            self.memory, self.begin, self.layout, self.count, first_chunk, self.tile_bytes
        )

    @property
    def end(self) -> int:
        """The first byte past the last tile."""
        return self.begin + (self.count - 1) * self.tile_bytes + self.layout.num_bytes

    @property
    def first_end(self) -> int:
        """The first byte past the first tile."""
        return self.begin + self.layout.num_bytes

    def place(self, tile, row, chunk, byte=0):
        """Return the byte at which a chunk begins, or a later one of it."""
        first = self.begin + tile * self.tile_bytes
        offset = self.layout.offset(row, self.first_chunk + chunk)
        return first + offset + byte

    def start(self, tile, row, chunk):
        """Offset of chunk 0 or 1 of a row, from which `beyond` finds other chunks of a tile."""
        offset = self.layout.offset(row, self.first_chunk + chunk)
        return index_temp(self.begin + tile * self.tile_bytes + offset)

    def beyond(self, start, rows, chunks):
        """Return the byte `rows` rows, a multiple of 8, and `chunks` chunks, an even number, on.

        Both are compile-time constants, so addresses are `start` or its xor with a constant, plus
        an immediate. `place` would take a register for each chunk.
        """
        layout = self.layout
        offset = chunks * CHUNK_BYTES
        if layout.is_swizzled:
            low = T.truncmod(chunks, BANK_ROWS) * CHUNK_BYTES
            start, offset = T.bitwise_xor(start, low), offset - low
        return start + offset + rows * layout.stride

    def element_place(self, tile, row, column):
        """Return the byte at which an element begins."""
        layout = self.layout
        chunk, rest = (f(column, layout.per_chunk) for f in (T.truncdiv, T.truncmod))
        return self.place(tile, row, chunk, rest * STORED_ITEMSIZE[layout.dtype])

    def load_float(self, tile, row, column):
        """Load an element, widened to float32."""
        place = self.element_place(tile, row, column)
        return self.memory.load_element(place, self.layout.dtype)

    def store_float(self, tile, row, column, value) -> None:
        """Store an element, narrowed from float32."""
        place, dtype = self.element_place(tile, row, column), self.layout.dtype
        if dtype == F32:
            self.memory.store(place, value)
            return
        word = Registers(1, U32, "word")
        self.isa.pack(word[0], dtype, value, T.float32(0))
        self.memory.store_half(place, T.bitwise_and(word[0], T.uint32(0xFFFF)))

    def store_pair(self, tile, row, column, low, high) -> None:
        """Store two elements next to each other, narrowed from float32."""
        place, dtype = self.element_place(tile, row, column), self.layout.dtype
        words = Registers(STORED_ITEMSIZE[dtype] // 2, U32, "words")
        if dtype == F32:
            words[0], words[1] = (T.reinterpret(U32, x) for x in (low, high))
        else:
            self.isa.pack(words[0], dtype, low, high)
        self.memory.store(place, *words)

    def load_floats(self, tile, row, column, count: int) -> Registers:
        """Load `count` elements, 2 or a multiple of a chunk, widened to float32."""
        layout, values = self.layout, Registers(count, F32, "values")
        dtype, step = layout.dtype, min(count, layout.per_chunk)
        for first in range(0, count, step):
            num_words = step * STORED_ITEMSIZE[dtype] // 4
            words = Registers(num_words, U32, "words")
            self.memory.load([*words], self.element_place(tile, row, column + first))
            self.isa.widen_words(words, dtype, values, first)
        return values
