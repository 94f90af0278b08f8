# SPDX-License-Identifier: Apache-2.0
"""Rows of K and V at listed slots: what a row of Q attends to instead of all its sequence."""

from __future__ import annotations

from tvm.script import tirx as T

from ...layout import QuantizedPages, latent_index, slot_offset, slot_page
from ..pages.kv_rows import PagedRows, Tile
from ..rows.kv_blocks import TILE


@T.meta_class
class ListedTile(Tile):
    """Some slots of a list, which are looked up once."""

    def __init__(self, rows: ListedRows, position, count: int):
        page_size, self.rows = rows.spec.page_size, rows
        self.page = T.alloc_local((count,), "int32")
        self.offset = T.alloc_local((count,), "int32")
        for i in range(count):
            entry = T.min(rows.first_entry + position + i, rows.last_entry)
            T.buffer_store(self.offset, rows.values[entry], [i])  # the slot
            T.buffer_store(self.page, slot_page(self.offset[i], page_size), [i])
            T.buffer_store(self.offset, slot_offset(self.offset[i], page_size), [i])

    def _element(self, plane: int, row, column) -> tuple:
        pages = self.rows.pages
        if isinstance(pages, QuantizedPages):
            pages = pages.of_plane(plane)
        return pages, self.rows.index(self.page[row], plane, self.offset[row], column)


class ListedRows(PagedRows):
    """The rows at a list of slots: `values` has slots, and "positions" count in the list."""

    run = TILE  # of any slots that are taken together

    def tile(self, position, count: int) -> Tile:
        """`count` slots from `position` on."""
        return ListedTile(self, position, count)


class ListedLatentRows(ListedRows):
    """The same of latent rows."""

    def index(self, page, plane, offset, column) -> tuple:
        """As of `LatentRows`."""
        return latent_index(page, offset, column)
