# SPDX-License-Identifier: Apache-2.0
"""Copies of rows within a pool, into it and out of it: pages, slots in order, dense arrays.

Rows are quantized on their way into quantized pages, and dequantized on their way out.
"""

from tvm.script import tirx as T

from ..define import attributes
from ..layout import (
    K_PLANE,
    V_PLANE,
    row_bytes,
    rows_of,
    rows_per_slot,
    slot_offset,
    slot_page,
    slot_row,
    view_pages,
)
from ..script import prim_func
from ..signatures.moves import (
    COMPACT_COPY,
    COPY_PAGES,
    COPY_SINGLE_PAGE,
    DEBUG_GET_KV,
    DEBUG_GET_KV_MLA,
    CopyInputs,
    ReadInputs,
)
from ..spec import ITEMSIZE, KernelSpec
from ..targets import components_of


def copy_single_page(spec: KernelSpec):
    """Build the kernel that copies the first `length` slots of a page to another page."""
    c, num_rows, copied_bytes = components_of(spec), rows_per_slot(spec), 2 * row_bytes(spec)

    @prim_func(arguments=COPY_SINGLE_PAGE.of(spec))
    def copy_single_page(a: CopyInputs):
        T.func_attr(attributes(spec))
        stored = T.meta_var(view_pages(a.pages, spec))
        worker = c.Worker(spec)
        rows = c.RowCopy(worker, stored, stored)
        for item in worker.items(T.int32(num_rows), a.length * copied_bytes):
            index: T.int32 = item  # K or V of a head
            for offset in rows.rows(a.length):
                source_row = T.meta_var(slot_row(a.source, index, offset, spec))
                rows.copy(source_row, slot_row(a.destination, index, offset, spec))

    return copy_single_page


def copy_pages(spec: KernelSpec):
    """Build the kernel that copies the first slots of pages to other pages.

    The copies are made in any order, so none writes what another one reads or writes.
    """
    c, num_rows, copied_bytes = components_of(spec), rows_per_slot(spec), 2 * row_bytes(spec)

    @prim_func(arguments=COPY_PAGES.of(spec))
    def copy_pages(a: CopyInputs):
        T.func_attr(attributes(spec))
        copies, num_copies = T.meta_var((a.copies, a.copies.shape[1]))
        stored = T.meta_var(view_pages(a.pages, spec))
        worker = c.Worker(spec)
        rows = c.RowCopy(worker, stored, stored)
        for item in worker.items(num_copies * num_rows, spec.page_size * copied_bytes):
            copy: T.int32 = T.truncdiv(item, num_rows)
            index: T.int32 = T.truncmod(item, num_rows)  # K or V of a head
            source, destination, length = copies[0, copy], copies[1, copy], copies[2, copy]
            for offset in rows.rows(length):
                source_row = T.meta_var(slot_row(source, index, offset, spec))
                rows.copy(source_row, slot_row(destination, index, offset, spec))

    return copy_pages


def compact_copy(spec: KernelSpec):
    """Build the kernel that copies slots to other slots, one after the other.

    The copies of a head are made in order, so a slot may be written and then read. Heads do not
    depend on each other: workers share them, and a thread of a worker always copies the same
    elements of a row.
    """
    c, num_rows, copied_bytes = components_of(spec), rows_per_slot(spec), 2 * row_bytes(spec)
    page_size = spec.page_size

    @prim_func(arguments=COMPACT_COPY.of(spec))
    def compact_copy(a: CopyInputs):
        T.func_attr(attributes(spec))
        length_indptr, batch_size = T.meta_var((a.length_indptr, a.batch_size))
        stored = T.meta_var(view_pages(a.pages, spec))
        worker = c.Worker(spec)
        rows = c.RowCopy(worker, stored, stored)
        all_bytes = T.meta_var(
            T.cast(length_indptr[batch_size] - length_indptr[0], "int64") * copied_bytes
        )
        for item in worker.items(T.int32(num_rows), all_bytes):
            index: T.int32 = item  # K or V of a head
            begin, end = length_indptr[0], length_indptr[batch_size]
            for copy in range(begin, end):
                slot = a.src_dst_slots[0, copy]
                source, first = slot_page(slot, page_size), slot_offset(slot, page_size)
                slot = a.src_dst_slots[1, copy]
                destination, second = slot_page(slot, page_size), slot_offset(slot, page_size)
                for _ in rows.rows(1):
                    source_row = T.meta_var(slot_row(source, index, first, spec))
                    rows.copy(source_row, slot_row(destination, index, second, spec))

    return compact_copy


def debug_get_kv(spec: KernelSpec):
    """Build the kernel that reads slots back into dense arrays."""
    num_heads, page_size = spec.num_kv_heads, spec.page_size
    item_bytes = 2 * num_heads * (row_bytes(spec) + spec.qk_head_dim * ITEMSIZE[spec.row_dtype])
    c = components_of(spec)

    @prim_func(arguments=DEBUG_GET_KV.of(spec))
    def debug_get_kv(a: ReadInputs):
        T.func_attr(attributes(spec))
        stored = T.meta_var(view_pages(a.pages, spec))
        worker = c.Worker(spec)
        k_rows = c.RowCopy(worker, rows_of(stored, K_PLANE), a.k)
        v_rows = c.RowCopy(worker, rows_of(stored, V_PLANE), a.v)
        for row in worker.items(a.slots.shape[0], item_bytes):
            slot = a.slots[row]
            if slot >= 0:
                page, offset = slot_page(slot, page_size), slot_offset(slot, page_size)
                for h in k_rows.rows(num_heads):
                    k_rows.copy((page, K_PLANE, h, offset), (a.layer, row, h))
                for h in v_rows.rows(num_heads):
                    v_rows.copy((page, V_PLANE, h, offset), (a.layer, row, h))

    return debug_get_kv


def debug_get_kv_mla(spec: KernelSpec):
    """Build the kernel that reads slots back into a dense array."""
    page_size = spec.page_size
    item_bytes = row_bytes(spec) + spec.qk_head_dim * ITEMSIZE[spec.row_dtype]
    c = components_of(spec)

    @prim_func(arguments=DEBUG_GET_KV_MLA.of(spec))
    def debug_get_kv_mla(a: ReadInputs):
        T.func_attr(attributes(spec))
        worker = c.Worker(spec)
        rows = c.RowCopy(worker, view_pages(a.pages, spec), a.kv)
        for row in worker.items(a.slots.shape[0], item_bytes):
            slot = a.slots[row]
            if slot >= 0:
                page, offset = slot_page(slot, page_size), slot_offset(slot, page_size)
                for _ in rows.rows(1):
                    rows.copy((page, offset), (a.layer, row))

    return debug_get_kv_mla
