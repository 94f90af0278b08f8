# SPDX-License-Identifier: Apache-2.0
"""Where the K and V rows of one sequence and one KV head lie, for threads that copy tiles of them.

A thread copies a few rows of each tile. It finds out where they lie a tile ahead (`find`), so that
the copies (`pointer`) do not wait for the page table.
"""

from __future__ import annotations

from tvm.script import tirx as T

from ..layout import K_PLANE, V_PLANE, latent_index, row_index
from ..spec import KernelSpec
from .emit import Registers


def as_int64(value):
    """Row numbers times row sizes may exceed 32 bits."""
    return T.cast(value, "int64")


class PagedRows:
    """The rows that a page table gives a sequence.

    Parameters
    ----------
    spec : KernelSpec
    a : the kernel's arguments `pages` and `page_values`.
    first_entry : int32
        Entry of the sequence's first page in `page_values`.
    head : int32
        The KV head.
    rows_per_thread : int
        Of a tile.
    """

    def __init__(self, spec: KernelSpec, a, first_entry, head, rows_per_thread: int):
        self.spec, self.a, self.first_entry, self.head = spec, a, first_entry, head
        self.page = Registers(rows_per_thread, "int32", "page")
        self.offset = Registers(rows_per_thread, "int32", "offset")

    def find(self, i, position) -> None:
        """Look up the i-th row of the thread; the sequence holds the position."""
        page_size = self.spec.page_size
        entry = self.first_entry + T.truncdiv(position, page_size)
        self.page[i] = self.a.page_values[entry]
        self.offset[i] = T.truncmod(position, page_size)

    def k_pointer(self, i, column):
        """Where the i-th row of K is, from a column on."""
        return self._pointer(K_PLANE, i, column)

    def v_pointer(self, i, column):
        """Where the i-th row of V is, from a column on."""
        return self._pointer(V_PLANE, i, column)

    def _pointer(self, plane: int, i, column):
        index = row_index(as_int64(self.page[i]), plane, self.head, self.offset[i], column)
        return self.a.pages.ptr_to(list(index))


class LatentRows(PagedRows):
    """The latent rows of MLA: K is the whole row, and V its first columns."""

    def _pointer(self, plane: int, i, column):
        return self.a.pages.ptr_to(
            list(latent_index(as_int64(self.page[i]), self.offset[i], column))
        )


def rows_of_pages(spec: KernelSpec, *arguments) -> PagedRows:
    """The rows of a spec's pages; the arguments are those of `PagedRows`."""
    return (LatentRows if spec.kind == "mla" else PagedRows)(spec, *arguments)


class RaggedRows:
    """Rows of ragged K and V.

    Parameters
    ----------
    a : the kernel's arguments `k` and `v`.
    first_row : int32
        The sequence's first row.
    head : int32
        The KV head.
    rows_per_thread : int
        Of a tile.
    """

    def __init__(self, a, first_row, head, rows_per_thread: int):
        self.a, self.first_row, self.head = a, first_row, head
        self.row = Registers(rows_per_thread, "int32", "row")

    def find(self, i, position) -> None:
        """Look up the i-th row of the thread."""
        self.row[i] = self.first_row + position

    def k_pointer(self, i, column):
        """Where the i-th row of K is, from a column on."""
        return self.a.k.ptr_to([as_int64(self.row[i]), self.head, column])

    def v_pointer(self, i, column):
        """Where the i-th row of V is, from a column on."""
        return self.a.v.ptr_to([as_int64(self.row[i]), self.head, column])
