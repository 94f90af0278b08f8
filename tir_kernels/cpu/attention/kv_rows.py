# SPDX-License-Identifier: Apache-2.0
"""Access to the K and V rows of a sequence and a KV head, in pages or in ragged arrays.

The attention skeletons see tiles of consecutive positions only. A tile may start or end beyond
the sequence: its rows are then some other row of that sequence, which the mask hides.
"""

from __future__ import annotations

import copy
from collections.abc import Callable

from tvm.script import tirx as T

from ...layout import (
    K_PLANE,
    V_PLANE,
    QuantizedPages,
    latent_index,
    row_index,
    slot_offset,
    slot_page,
)
from ...spec import KernelSpec
from ..codes import load_values
from ..simd import index_temp, load, prefetch


class Tile:
    """Some consecutive positions: `k` and `v` give ``(buffer, index)`` of an element."""

    def __init__(self, k: Callable, v: Callable):
        self.k, self.v = k, v

    def load_k(self, row, column, lanes: int):
        """`lanes` columns of K as float32."""
        return load(*self.k(row, column), lanes)

    def load_v(self, row, column, lanes: int):
        """`lanes` columns of V as float32."""
        return load(*self.v(row, column), lanes)

    def prefetch_k(self, row, column) -> None:
        """Ask for the cache line of K."""
        prefetch(*self.k(row, column))

    def prefetch_v(self, row, column) -> None:
        """Ask for the cache line of V."""
        prefetch(*self.v(row, column))


class QuantizedTile(Tile):
    """As `Tile`, of `QuantizedPages`."""

    def load_k(self, row, column, lanes: int):
        return self._load(self.k(row, column), lanes)

    def load_v(self, row, column, lanes: int):
        return self._load(self.v(row, column), lanes)

    def prefetch_k(self, row, column) -> None:
        self._prefetch(self.k(row, column))

    def prefetch_v(self, row, column) -> None:
        self._prefetch(self.v(row, column))

    @staticmethod
    def _load(element, lanes: int):
        pages, (*row, column) = element
        return load_values(pages, row, column, lanes)

    @staticmethod
    def _prefetch(element) -> None:
        """Ask for the line of a column's code and, if it may be the first, that of the scales."""
        pages, (*row, column) = element
        prefetch(pages.codes, (*row, column * pages.codec.bits // 8))
        if not isinstance(column, int) or column == 0:
            prefetch(pages.scales, (*row, 0))


class PagedRows:
    """The rows that a page table gives a sequence.

    Parameters
    ----------
    spec : KernelSpec
    pages : Buffer ``[P, 2, Hk, page, D]``, or QuantizedPages
    values : int32 Buffer, the page table of the batch.
    first_entry, last_entry : int32
        Entries of the sequence's first and last page in `values`.
    head : int32
        The KV head.
    slot_of : callable, optional
        Maps a position to its slot in the sequence; None where they are the same.
    """

    def __init__(
        self, spec: KernelSpec, pages, values, first_entry, last_entry, *, head, slot_of=None
    ):
        self.spec, self.pages, self.values = spec, pages, values
        self.first_entry, self.last_entry = first_entry, last_entry
        self.head, self.slot_of = head, slot_of

    def of_local_head(self, local_head) -> PagedRows:
        """The same positions of the KV head so many heads after this one, or of the last one."""
        rows = copy.copy(self)
        rows.head = index_temp(T.min(self.head + local_head, self.spec.num_kv_heads - 1))
        return rows

    @property
    def run(self) -> int:
        """Aligned positions that share a page."""
        return 1 if self.slot_of else self.spec.page_size

    def tile(self, position, count: int) -> Tile:
        """`count` positions, a power of two; `position` is aligned to ``min(count, run)``."""
        run = min(self.run, count)
        locations = [self._locate(position + i) for i in range(0, count, run)]
        is_quantized = isinstance(self.pages, QuantizedPages)

        def element(plane, row, column):
            page, offset = locations[row // run if len(locations) > 1 else 0]
            within = row % run if len(locations) > 1 else row
            pages = self.pages.of_plane(plane) if is_quantized else self.pages
            return pages, self.index(page, plane, offset + within, column)

        return (QuantizedTile if is_quantized else Tile)(
            lambda row, column: element(K_PLANE, row, column),
            lambda row, column: element(V_PLANE, row, column),
        )

    def index(self, page, plane, offset, column) -> tuple:
        """Index of an element of the row at slot `offset` of `page`."""
        return row_index(page, plane, self.head, offset, column)

    def _locate(self, position):
        slot = self.slot_of(position) if self.slot_of else position
        page_size = self.spec.page_size
        entry = T.min(self.first_entry + slot_page(slot, page_size), self.last_entry)
        page = index_temp(self.values[entry])
        # A run of a whole page starts at its slot 0.
        whole = not self.slot_of and page_size == 1
        return page, 0 if whole else index_temp(slot_offset(slot, page_size))


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
        rows = [
            index_temp(T.min(self.first_row + position + i, self.last_row)) for i in range(count)
        ]
        return Tile(
            lambda row, column: (self.k, (rows[row], self.head, column)),
            lambda row, column: (self.v, (rows[row], self.head, column)),
        )
