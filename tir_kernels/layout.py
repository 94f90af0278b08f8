# SPDX-License-Identifier: Apache-2.0
"""The only place that spells a page's shape and indexing."""

from __future__ import annotations

from collections.abc import Callable

from tvm.script import tirx as T

from .spec import KernelSpec

K_PLANE, V_PLANE = 0, 1


def first_element():
    """A variable for where the elements of a buffer begin in its allocation.

    It has 64 bits, and that is what gives the offsets of all elements 64 bits: TVM computes an
    offset from this and from the indices, each of them widened to the type of this before it is
    multiplied. A pool may have more than 2**31 elements, though pages, slots and rows are counted
    in 32 bits. Every buffer of pages or rows is matched with it.
    """
    return T.int64()


def page_shape(spec: KernelSpec) -> tuple[int, ...]:
    """Shape of one page: ``(2, num_kv_heads, page_size, head_dim)``, K rows, then V rows.

    With MLA ``(page_size, head_dim)``.
    """
    row_sets = () if spec.kind == "mla" else (2, spec.num_kv_heads)
    return (*row_sets, spec.page_size, spec.qk_head_dim)


def pages_shape(num_pages, spec: KernelSpec) -> tuple:
    """Shape of a layer's pool: ``(num_pages, *page_shape)``."""
    return (num_pages, *page_shape(spec))


def rows_per_slot(spec: KernelSpec) -> int:
    """Rows that a slot holds: K and V of each head, or the latent row of MLA."""
    return 1 if spec.kind == "mla" else 2 * spec.num_kv_heads


def slot_row(page, index, offset, spec: KernelSpec) -> tuple:
    """Indices, less the last axis, of row `index` of ``rows_per_slot`` at slot `offset`."""
    if spec.kind == "mla":
        return (page, offset)
    return (page, index // spec.num_kv_heads, index % spec.num_kv_heads, offset)


def row_index(page, plane, head, offset, dim) -> tuple:
    """Index of element `dim` of the row that `head` keeps at slot `offset` of `page`."""
    return (page, plane, head, offset, dim)


def latent_index(page, offset, dim) -> tuple:
    """Index of element `dim` of the latent row of MLA at slot `offset` of `page`."""
    return (page, offset, dim)


def slot_page(slot, page_size):
    """Page of a slot (``slot = page * page_size + offset``)."""
    return slot // page_size


def slot_offset(slot, page_size):
    """Offset of a slot within its page."""
    return slot % page_size


class Slot:
    """Where a slot's rows lie: ``page`` and ``offset``, computed once."""

    def __init__(self, slot, spec: KernelSpec, temp: Callable):
        self.spec = spec
        self.page = temp(slot_page(slot, spec.page_size), 1, "int32")
        self.offset = temp(slot_offset(slot, spec.page_size), 1, "int32")

    def row(self, plane: int, head) -> tuple:
        """Indices of the row of `head`, less the last axis."""
        return (self.page, plane, head, self.offset)

    def indexed_row(self, index) -> tuple:
        """Indices of the slot's row `index`, of ``rows_per_slot``, less the last axis."""
        return slot_row(self.page, index, self.offset, self.spec)
