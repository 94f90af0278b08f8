# SPDX-License-Identifier: Apache-2.0
"""The only place that spells a page's shape and indexing."""

from __future__ import annotations

from .spec import KernelSpec

K_PLANE, V_PLANE = 0, 1


def page_shape(spec: KernelSpec) -> tuple[int, int, int, int]:
    """Shape of one page: ``(2, num_kv_heads, page_size, head_dim)``; K rows, then V rows."""
    return (2, spec.num_kv_heads, spec.page_size, spec.qk_head_dim)


def pages_shape(num_pages, spec: KernelSpec) -> tuple:
    """Shape of a layer's pool: ``(num_pages, 2, num_kv_heads, page_size, head_dim)``."""
    return (num_pages, *page_shape(spec))


def row_index(page, plane, head, offset, dim) -> tuple:
    """Index of element `dim` of the row that `head` keeps at slot `offset` of `page`."""
    return (page, plane, head, offset, dim)


def slot_page(slot, page_size):
    """Page of a slot (``slot = page * page_size + offset``)."""
    return slot // page_size


def slot_offset(slot, page_size):
    """Offset of a slot within its page."""
    return slot % page_size
