# SPDX-License-Identifier: Apache-2.0
"""Access to the K and V rows of a sequence and a KV head, in pages or in ragged arrays.

Kernels see tiles of consecutive positions. A tile may start or end beyond the sequence: its rows
are then some other row of that sequence, which the mask hides.
"""

from __future__ import annotations

from tvm.script import tirx as T

from ...layout import (
    K_PLANE,
    V_PLANE,
    QuantizedPages,
    latent_index,
    row_index,
    rows_of,
    slot_offset,
    slot_page,
)
from ...spec import KernelSpec
from ..isa.simd import load, prefetch
from .codes import load_values


class Tile:
    """Some positions in order: `k` and `v` give ``(pages, index)`` of an element."""

    def k(self, row, column) -> tuple:
        """An element of K."""
        return self._element(K_PLANE, row, column)

    def v(self, row, column) -> tuple:
        """An element of V."""
        return self._element(V_PLANE, row, column)

    def load_k(self, row, column, lanes: int):
        """`lanes` columns of K as float32."""
        return load_row(*self.k(row, column), lanes)

    def load_v(self, row, column, lanes: int):
        """`lanes` columns of V as float32."""
        return load_row(*self.v(row, column), lanes)

    def prefetch_k(self, row, column) -> None:
        """Ask for the cache line of K."""
        _prefetch(*self.k(row, column))

    def prefetch_v(self, row, column) -> None:
        """Ask for the cache line of V."""
        _prefetch(*self.v(row, column))


@T.meta_class
class PageTile(Tile):
    """Positions in pages, which are looked up once."""

    def __init__(self, rows: PagedRows, position, count: int):
        page_size = rows.spec.page_size
        self.rows, self.run = rows, min(page_size, count)
        self.num_pages = count // self.run
        self.page = T.alloc_local((self.num_pages,), "int32")
        self.offset = T.alloc_local((self.num_pages,), "int32")
        for i in range(self.num_pages):
            slot = position + i * self.run
            entry = T.min(rows.first_entry + slot_page(slot, page_size), rows.last_entry)
            T.buffer_store(self.page, rows.values[entry], [i])
            T.buffer_store(self.offset, slot_offset(slot, page_size), [i])

    def _element(self, plane: int, row, column) -> tuple:
        pages, i = self.rows.pages, 0
        if self.num_pages > 1:
            i, row = row // self.run, row % self.run
        index = self.rows.index(self.page[i], plane, self.offset[i] + row, column)
        return rows_of(pages, plane), index


@T.meta_class
class RaggedTile(Tile):
    """Positions in ragged arrays."""

    def __init__(self, rows: RaggedRows, position, count: int):
        self.rows, self.row = rows, T.alloc_local((count,), "int32")
        for i in range(count):
            row = T.min(rows.first_row + position + i, rows.last_row)
            T.buffer_store(self.row, row, [i])

    def k(self, row, column) -> tuple:
        return self.rows.k, (self.row[row], self.rows.head, column)

    def v(self, row, column) -> tuple:
        return self.rows.v, (self.row[row], self.rows.head, column)


def load_row(pages, index, lanes: int):
    """`lanes` columns of a row of pages as float32, from `index` on."""
    if isinstance(pages, QuantizedPages):
        return load_values(pages, index[:-1], index[-1], lanes)
    return load(pages, index, lanes)


def _prefetch(pages, index) -> None:
    """Ask for the line of an element; with a row's first code also for that of the scales."""
    if not isinstance(pages, QuantizedPages):
        prefetch(pages, index)
        return
    *row, column = index
    prefetch(pages.codes, (*row, column * pages.codec.bits // 8))
    if not isinstance(column, int) or column == 0:
        prefetch(pages.scales, (*row, 0))


class PagedRows:
    """The rows that a page table gives a sequence.

    Parameters
    ----------
    spec : KernelSpec
    pages : what `view_pages` returns
    values : int32 Buffer, the page table of the batch.
    first_entry, last_entry : int32
        Entries of the sequence's first and last page in `values`.
    head : int32
        The KV head.
    """

    def __init__(self, spec: KernelSpec, pages, values, first_entry, last_entry, *, head):
        self.spec, self.pages, self.values = spec, pages, values
        self.first_entry, self.last_entry, self.head = first_entry, last_entry, head

    @property
    def run(self) -> int:
        """Aligned positions that share a page."""
        return self.spec.page_size

    def tile(self, position, count: int) -> Tile:
        """`count` positions, a power of two; `position` is aligned to ``min(count, run)``."""
        return PageTile(self, position, count)

    def index(self, page, plane, offset, column) -> tuple:
        """Index of an element of the row at slot `offset` of `page`."""
        return row_index(page, plane, self.head, offset, column)


class LatentRows(PagedRows):
    """The latent rows of MLA: K is the whole row, V its first columns."""

    def index(self, page, plane, offset, column) -> tuple:
        return latent_index(page, offset, column)


class RaggedRows:
    """Rows of ragged K and V.

    Parameters
    ----------
    k, v : Buffers ``[S, Hk, Dqk]`` and ``[S, Hk, Dv]``
    first_row, last_row : int32
        The sequence's first and last row.
    head : int32
        The KV head.
    """

    run = 1  # positions that one lookup serves

    def __init__(self, k, v, first_row, last_row, *, head):
        self.k, self.v, self.head = k, v, head
        self.first_row, self.last_row = first_row, last_row

    def tile(self, position, count: int) -> Tile:
        """`count` positions from `position`."""
        return RaggedTile(self, position, count)
