# SPDX-License-Identifier: Apache-2.0
"""The K and V rows of a sequence and a KV head, for threads that copy tiles of them.

A thread copies a few rows of each tile. It looks up their pages a tile ahead (`find`), so that the
copies (from `source`) do not wait for the page table; the rest is computed when it is needed, since
registers are scarce.
"""

from __future__ import annotations

from dataclasses import replace

from tvm.script import tirx as T

from ...layout import K_PLANE, latent_index, row_index, rows_of, view_pages
from ...releases import buffer_of
from ...script import inline
from ...semantics.rope import refuse_inline
from ...signatures.inputs import PagedInputs
from ...spec import KernelSpec
from ..isa import isa_of


def with_page_views(spec: KernelSpec, a: PagedInputs) -> PagedInputs:
    """Inputs whose pages are as `layout.view_pages` gives them.

    Pages that keep K multiplied with Hadamard matrices refuse calls that ask for a rotation.
    """
    if spec.codec and spec.codec.has_hadamard:
        refuse_inline(spec, a)
        a = replace(a, rotary_mode=None)
    return replace(a, pages=view_pages(a.pages, spec))


@T.meta_class
class PagedRows:
    """The rows that a page table gives a sequence.

    Parameters
    ----------
    spec : KernelSpec
    pages, page_ids : the kernel's arguments
    rows_per_thread : int
        Of a tile.
    """

    def __init__(self, spec: KernelSpec, pages, page_ids, rows_per_thread: int):
        self.spec, self.isa = spec, isa_of(spec.target)
        self.pages, self.page_ids = pages, page_ids
        self.page = T.alloc_local((rows_per_thread,), "int32", layout=None)
        self.first_entry = T.local_scalar("int32")
        self.head = T.local_scalar("int32")
        self.slot = None

    @inline
    def begin(self, first_entry, head):
        """Point at the sequence whose pages begin at an entry of `page_ids`."""
        self.first_entry = first_entry
        self.head = head

    def keep_slot(self, position) -> None:
        """Keep where in a page a position is: where all rows of the thread are in theirs."""
        if self.slot is None:
            self.slot = T.local_scalar("int32")
        T.buffer_store(buffer_of(self.slot), T.truncmod(position, self.spec.page_size), [0])

    @property
    def variables(self) -> tuple:
        """Return the variables that say which sequence it is."""
        return self.first_entry, self.head

    @inline
    def find(self, i, position):
        """Look up the page of the i-th row of the thread; the sequence holds the position."""
        entry = T.meta_var(self.first_entry + T.truncdiv(position, self.spec.page_size))
        self.page[i] = self.page_ids[entry]

    def source(self, plane: int, i, position, column):
        """Return the buffer and index of a column of the i-th row of K or V; `find` found it."""
        page, slot = self.isa.wide(self.page[i]), self._slot(position)
        rows = rows_of(self.pages, plane)
        return rows, row_index(page, plane, self.head, slot, column)

    def _slot(self, position):
        return self.slot if self.slot is not None else T.truncmod(position, self.spec.page_size)


class LatentRows(PagedRows):
    """The latent rows of MLA: K is the whole row, and V its first columns."""

    def source(self, plane: int, i, position, column):
        """Return the buffer and index of a column of the i-th row, which `find` found there."""
        page, slot = self.isa.wide(self.page[i]), self._slot(position)
        return self.pages, latent_index(page, slot, column)


class QuantizedRows(PagedRows):
    """Rows of `QuantizedPages`, of any kind of spec."""

    def code_source(self, plane, i, position, byte):
        """Return the buffer and index of a byte of the codes of the i-th row."""
        row_bytes = self.spec.codec.row_bytes(self.spec.qk_head_dim)
        return self._byte_source(i, self._row(plane, position) * row_bytes + byte)

    def scale_source(self, plane, i, position, word):
        """Return the buffer and index of a word of the i-th row's scales, from a whole word on."""
        scale = word * self.scales_per_word
        if self.may_shift:
            scale = scale - T.truncdiv(self.scale_shift(plane, position), 2)
        itemsize = 4 // self.scales_per_word
        scale = self._row(plane, position) * len(self.pages.groups) + scale
        return self._byte_source(i, self.pages.scales_begin + scale * itemsize)

    def _row(self, plane, position):
        """Rows of a page before one."""
        head = 0 if self.spec.is_latent else plane * self.spec.num_kv_heads + self.head
        return head * self.spec.page_size + self._slot(position)

    def _byte_source(self, i, byte):
        """Return the buffer and index of a byte of the page of the i-th row.

        The offset in the page goes through an instruction that the compiler does not look into: it
        would keep sums of the base address and parts of offsets, in two registers each.
        """
        codes, offset = self.pages.codes, self.isa.opaque(byte)
        first = [self.isa.wide(self.page[i]), *[0] * (len(codes.shape) - 2)]
        return codes, (*first, offset)

    @property
    def scales_per_word(self) -> int:
        """Scales in 4 bytes."""
        return 2 if self.spec.codec.scale_dtype == "bfloat16" else 1

    @property
    def may_shift(self) -> bool:
        """Whether the scales of some rows begin in the middle of a word."""
        return len(self.pages.groups) % self.scales_per_word != 0

    def scale_shift(self, plane, position):
        """Bytes from the first word of the scales of a row to its first scale."""
        head = 0 if self.spec.is_latent else self.head
        row = (plane * self.spec.num_kv_heads + head) * self.spec.page_size + self._slot(position)
        return T.truncmod(row * len(self.pages.groups), 2) * 2 if self.may_shift else 0


def paged_rows(spec: KernelSpec, pages, page_ids, rows_per_thread: int) -> PagedRows:
    """Make the component for a spec's pages; the arguments are those of `PagedRows`."""
    kind = LatentRows if spec.is_latent else PagedRows
    kind = QuantizedRows if spec.codec else kind
    return kind(spec, pages, page_ids, rows_per_thread)


@T.meta_class
class RaggedRows:
    """Rows of ragged K and V; see `PagedRows`.

    Parameters
    ----------
    spec : KernelSpec
    k, v : the kernel's arguments
    """

    def __init__(self, spec: KernelSpec, k, v):
        self.isa, self.k, self.v = isa_of(spec.target), k, v
        self.first_row = T.local_scalar("int32")
        self.head = T.local_scalar("int32")

    @inline
    def begin(self, first_row, head):
        """Point at the sequence whose rows begin at a row of `k` and `v`."""
        self.first_row = first_row
        self.head = head

    @property
    def variables(self) -> tuple:
        """Return the variables that say which sequence it is."""
        return self.first_row, self.head

    def keep_slot(self, position) -> None:
        """Do nothing: there are no pages."""

    @inline
    def find(self, i, position):
        """There is nothing to look up."""

    def source(self, plane: int, i, position, column):
        """Return the buffer and index of a column of the row of K or V at a position."""
        rows = self.k if plane == K_PLANE else self.v
        return rows, (self.isa.wide(self.first_row + position), self.head, column)
