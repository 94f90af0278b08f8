# SPDX-License-Identifier: Apache-2.0
"""Copies of rows within a pool, into it and out of it: pages, slots in order, dense arrays.

Rows are quantized on their way into quantized pages, and dequantized on their way out.
"""

from tvm.script import tirx as T

from ..define import attributes
from ..layout import (
    K_PLANE,
    V_PLANE,
    match_pages,
    row_bytes,
    rows_of,
    rows_per_slot,
    slot_offset,
    slot_page,
    slot_row,
    view_pages,
)
from ..script import prim_func
from ..signatures.arrays import match_int32, row_matcher
from ..spec import ITEMSIZE, KernelSpec
from ..targets import components_of


def copy_single_page(spec: KernelSpec):
    """Build the kernel that copies the first `length` slots of a page to another page.

    Arguments: pages ``[P, 2, Hk, page, D]`` (MLA: ``[P, page, D]``), source page, destination page,
    length: int64.
    """
    c, num_rows, copied_bytes = components_of(spec), rows_per_slot(spec), 2 * row_bytes(spec)

    @prim_func
    def copy_single_page(
        var_pages: T.handle, source: T.int64, destination: T.int64, length: T.int64
    ):
        T.func_attr(attributes(spec))
        num_pages = T.int32()
        pages = match_pages(var_pages, num_pages, spec)
        stored = T.meta_var(view_pages(pages, spec))
        worker = c.Worker(spec)
        rows = c.RowCopy(worker, stored, stored)
        for item in worker.items(T.int32(num_rows), length * copied_bytes):
            index: T.int32 = item  # K or V of a head
            for offset in rows.rows(length):
                source_row = T.meta_var(slot_row(source, index, offset, spec))
                rows.copy(source_row, slot_row(destination, index, offset, spec))

    return copy_single_page


def copy_pages(spec: KernelSpec):
    """Build the kernel that copies the first slots of pages to other pages.

    Arguments: pages ``[P, 2, Hk, page, D]`` (MLA: ``[P, page, D]``), copies int32 ``[3, n]``: of
    each copy the source page, the destination page and the number of slots. They are made in any
    order, so none writes what another one reads or writes.
    """
    c, num_rows, copied_bytes = components_of(spec), rows_per_slot(spec), 2 * row_bytes(spec)

    @prim_func
    def copy_pages(var_pages: T.handle, var_copies: T.handle):
        T.func_attr(attributes(spec))
        num_pages, n = T.int32(), T.int64()
        pages = match_pages(var_pages, num_pages, spec)
        copies = match_int32(var_copies, 3, n)
        stored = T.meta_var(view_pages(pages, spec))
        worker = c.Worker(spec)
        rows = c.RowCopy(worker, stored, stored)
        for item in worker.items(n * num_rows, spec.page_size * copied_bytes):
            copy: T.int32 = T.truncdiv(item, num_rows)
            index: T.int32 = T.truncmod(item, num_rows)  # K or V of a head
            source, destination, length = copies[0, copy], copies[1, copy], copies[2, copy]
            for offset in rows.rows(length):
                source_row = T.meta_var(slot_row(source, index, offset, spec))
                rows.copy(source_row, slot_row(destination, index, offset, spec))

    return copy_pages


def compact_copy(spec: KernelSpec):
    """Build the kernel that copies slots to other slots, one after the other.

    Arguments: pages ``[P, 2, Hk, page, D]`` (MLA: ``[P, page, D]``), length_indptr int32
    ``[B + 1]``, src_dst_slots int32 ``[2, n]``, batch_size int32. The copies of a head are made in
    order, so a slot may be written and then read. Heads do not depend on each other: workers share
    them, and a thread of a worker always copies the same elements of a row.
    """
    c, num_rows, copied_bytes = components_of(spec), rows_per_slot(spec), 2 * row_bytes(spec)
    page_size = spec.page_size

    @prim_func
    def compact_copy(
        var_pages: T.handle,
        var_length_indptr: T.handle,
        var_src_dst_slots: T.handle,
        batch_size: T.int32,
    ):
        T.func_attr(attributes(spec))
        num_pages, n = T.int32(), T.int64()
        pages = match_pages(var_pages, num_pages, spec)
        length_indptr = match_int32(var_length_indptr, T.cast(batch_size, "int64") + 1)
        src_dst_slots = match_int32(var_src_dst_slots, 2, n)
        stored = T.meta_var(view_pages(pages, spec))
        worker = c.Worker(spec)
        rows = c.RowCopy(worker, stored, stored)
        all_bytes = T.meta_var(
            T.cast(length_indptr[batch_size] - length_indptr[0], "int64") * copied_bytes
        )
        for item in worker.items(T.int32(num_rows), all_bytes):
            index: T.int32 = item  # K or V of a head
            begin, end = length_indptr[0], length_indptr[batch_size]
            for copy in range(begin, end):
                slot = src_dst_slots[0, copy]
                source, first = slot_page(slot, page_size), slot_offset(slot, page_size)
                slot = src_dst_slots[1, copy]
                destination, second = slot_page(slot, page_size), slot_offset(slot, page_size)
                for _ in rows.rows(1):
                    source_row = T.meta_var(slot_row(source, index, first, spec))
                    rows.copy(source_row, slot_row(destination, index, second, spec))

    return compact_copy


def debug_get_kv(spec: KernelSpec):
    """Build the kernel that reads slots back into dense arrays.

    Arguments: pages ``[P, 2, Hk, page, D]``, slots int32 ``[n]`` (a negative one:
    leave the row), k and v ``[num_layers, n, Hk, D]`` of type `KernelSpec.row_dtype`, layer: int64.
    """
    num_heads, page_size = spec.num_kv_heads, spec.page_size
    item_bytes = 2 * num_heads * (row_bytes(spec) + spec.qk_head_dim * ITEMSIZE[spec.row_dtype])
    c, match_rows = components_of(spec), row_matcher(spec, spec.row_dtype)

    @prim_func
    def debug_get_kv(
        var_pages: T.handle,
        var_slots: T.handle,
        var_k: T.handle,
        var_v: T.handle,
        layer: T.int64,
    ):
        T.func_attr(attributes(spec))
        num_pages, num_layers, n = T.int32(), T.int64(), T.int64()
        pages = match_pages(var_pages, num_pages, spec)
        slots = match_int32(var_slots, n)
        k = match_rows(var_k, num_layers, n, num_heads, spec.qk_head_dim)
        v = match_rows(var_v, num_layers, n, num_heads, spec.v_head_dim)
        stored = T.meta_var(view_pages(pages, spec))
        worker = c.Worker(spec)
        k_rows = c.RowCopy(worker, rows_of(stored, K_PLANE), k)
        v_rows = c.RowCopy(worker, rows_of(stored, V_PLANE), v)
        for row in worker.items(n, item_bytes):
            slot = slots[row]
            if slot >= 0:
                page, offset = slot_page(slot, page_size), slot_offset(slot, page_size)
                for h in k_rows.rows(num_heads):
                    k_rows.copy((page, K_PLANE, h, offset), (layer, row, h))
                for h in v_rows.rows(num_heads):
                    v_rows.copy((page, V_PLANE, h, offset), (layer, row, h))

    return debug_get_kv


def debug_get_kv_mla(spec: KernelSpec):
    """Build the kernel that reads slots back into a dense array.

    Arguments: pages ``[P, page, D]``, slots int32 ``[n]`` (a negative one: leave the
    row), kv ``[num_layers, n, D]`` of type `KernelSpec.row_dtype`, layer: int64.
    """
    width, page_size = spec.qk_head_dim, spec.page_size
    item_bytes = row_bytes(spec) + width * ITEMSIZE[spec.row_dtype]
    c, match_rows = components_of(spec), row_matcher(spec, spec.row_dtype)

    @prim_func
    def debug_get_kv_mla(
        var_pages: T.handle, var_slots: T.handle, var_kv: T.handle, layer: T.int64
    ):
        T.func_attr(attributes(spec))
        num_pages, num_layers, n = T.int32(), T.int64(), T.int64()
        pages = match_pages(var_pages, num_pages, spec)
        slots = match_int32(var_slots, n)
        kv = match_rows(var_kv, num_layers, n, width)
        worker = c.Worker(spec)
        rows = c.RowCopy(worker, view_pages(pages, spec), kv)
        for row in worker.items(n, item_bytes):
            slot = slots[row]
            if slot >= 0:
                page, offset = slot_page(slot, page_size), slot_offset(slot, page_size)
                for _ in rows.rows(1):
                    rows.copy((page, offset), (layer, row))

    return debug_get_kv_mla
