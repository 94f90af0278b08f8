# SPDX-License-Identifier: Apache-2.0
"""Where the K and V rows of one sequence and one KV head lie, for threads that copy tiles of them.

A thread copies a few rows of each tile. It looks up their pages a tile ahead (`find`), so that the
copies (`k_pointer`) do not wait for the page table; the rest is computed when it is needed, since
registers are scarce.
"""

from __future__ import annotations

from tvm.script import tirx as T

from ...layout import K_PLANE, V_PLANE, latent_index, row_index
from ...spec import KernelSpec
from ..emit import Registers


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

    def find(self, i, position) -> None:
        """Look up the page of the i-th row of the thread; the sequence holds the position."""
        entry = self.first_entry + T.truncdiv(position, self.spec.page_size)
        self.page[i] = self.a.page_values[entry]

    def k_pointer(self, i, position, column):
        """Where the i-th row of K is, which `find` found at this position, from a column on."""
        return self._pointer(K_PLANE, i, position, column)

    def v_pointer(self, i, position, column):
        """Where the i-th row of V is, likewise."""
        return self._pointer(V_PLANE, i, position, column)

    def _slot(self, position):
        return T.truncmod(position, self.spec.page_size)

    def _pointer(self, plane: int, i, position, column):
        page, slot = as_int64(self.page[i]), self._slot(position)
        return self.a.pages.ptr_to(list(row_index(page, plane, self.head, slot, column)))


class LatentRows(PagedRows):
    """The latent rows of MLA: K is the whole row, and V its first columns."""

    def _pointer(self, plane: int, i, position, column):
        page, slot = as_int64(self.page[i]), self._slot(position)
        return self.a.pages.ptr_to(list(latent_index(page, slot, column)))


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
    """

    def __init__(self, a, first_row, head):
        self.a, self.first_row, self.head = a, first_row, head

    def find(self, i, position) -> None:
        """There is nothing to look up."""

    def k_pointer(self, i, position, column):
        """Where the row of K at a position is, from a column on."""
        return self.a.k.ptr_to([as_int64(self.first_row + position), self.head, column])

    def v_pointer(self, i, position, column):
        """Where the row of V at a position is, from a column on."""
        return self.a.v.ptr_to([as_int64(self.first_row + position), self.head, column])
