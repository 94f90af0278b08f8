# SPDX-License-Identifier: Apache-2.0
"""Copies within a pool and out of it: one page, slots in order, slots to dense arrays."""

from __future__ import annotations

from tvm.script import tirx as T

from .cpu import moves, simd
from .layout import K_PLANE, V_PLANE, rows_per_slot, slot_row
from .spec import ITEMSIZE, KernelSpec


def _row_bytes(spec: KernelSpec) -> int:
    """Bytes that the copy of one row reads and writes."""
    return 2 * spec.qk_head_dim * ITEMSIZE[spec.kv_dtype]


def copy_single_page(spec: KernelSpec):
    """Build the kernel that copies the first `length` slots of a page to another page.

    Arguments: pages ``[P, 2, Hk, page, D]`` (MLA: ``[P, page, D]``), source page, destination page,
    length: int64.
    """

    def body(pages_handle, source, destination, length) -> None:
        pages = moves.match_pages(pages_handle, spec)

        def copy_rows(i) -> None:
            index = simd.index_temp(i)
            with T.serial(length) as offset:
                moves.copy_row(
                    pages,
                    slot_row(source, index, offset, spec),
                    pages,
                    slot_row(destination, index, offset, spec),
                    spec.target.lanes,
                )

        bytes_each = length * _row_bytes(spec)
        moves.for_each(T.int32(rows_per_slot(spec)), bytes_each, copy_rows)

    @T.prim_func(s_tir=True, private=True)
    def kernel(pages: T.handle, source: T.int64, destination: T.int64, length: T.int64):
        T.func_attr({"tirx.is_scheduled": True, "tirx.noalias": True})
        body(pages, source, destination, length)

    return kernel


def debug_get_kv(spec: KernelSpec):
    """Build the kernel that reads slots back into dense arrays.

    Arguments: pages ``[P, 2, Hk, page, D]``, position_map int32 ``[n]`` (slots; a negative one:
    leave the row), k and v ``[num_layers, n, Hk, D]`` of the pages' type, layer: int64.
    """

    def body(pages_handle, map_handle, k_handle, v_handle, layer) -> None:
        num_rows = T.int64()
        shape = (T.int64(), num_rows, spec.num_kv_heads, spec.qk_head_dim)
        pages = moves.match_pages(pages_handle, spec)
        position_map = moves.match(map_handle, (num_rows,), "int32")
        planes = (
            (K_PLANE, moves.match(k_handle, shape, spec.kv_dtype)),
            (V_PLANE, moves.match(v_handle, shape, spec.kv_dtype)),
        )

        def read_row(n) -> None:
            slot = simd.index_temp(position_map[n])
            with T.If(slot >= 0), T.Then():
                where = moves.Slot(slot, spec)
                for plane, sink in planes:
                    with T.serial(spec.num_kv_heads) as h:
                        moves.copy_row(
                            pages, where.row(plane, h), sink, (layer, n, h), spec.target.lanes
                        )

        moves.for_each(num_rows, 2 * spec.num_kv_heads * _row_bytes(spec), read_row)

    @T.prim_func(s_tir=True, private=True)
    def kernel(pages: T.handle, position_map: T.handle, k: T.handle, v: T.handle, layer: T.int64):
        T.func_attr({"tirx.is_scheduled": True, "tirx.noalias": True})
        body(pages, position_map, k, v, layer)

    return kernel


def compact_copy(spec: KernelSpec):
    """Build the kernel that copies slots to other slots, one after the other.

    Arguments: pages ``[P, 2, Hk, page, D]`` (MLA: ``[P, page, D]``), length_indptr int32
    ``[B + 1]``, src_dst_slots int32 ``[2, n]``, batch_size int32. The copies of a head are made in
    order, so a slot may be written and then read; heads do not depend on each other and share out
    the threads.
    """

    def body(pages_handle, indptr_handle, slots_handle, batch_size) -> None:
        pages = moves.match_pages(pages_handle, spec)
        indptr = moves.match(indptr_handle, (T.cast(batch_size, "int64") + 1,), "int32")
        slots = moves.match(slots_handle, (2, T.int64()), "int32")
        begin, end = simd.index_temp(indptr[0]), simd.index_temp(indptr[batch_size])
        count = simd.index_temp(end - begin)

        def copy_rows(i) -> None:
            index = simd.index_temp(i)
            with T.serial(count) as c:
                source = moves.Slot(slots[0, begin + c], spec)
                destination = moves.Slot(slots[1, begin + c], spec)
                moves.copy_row(
                    pages,
                    source.indexed_row(index),
                    pages,
                    destination.indexed_row(index),
                    spec.target.lanes,
                )

        bytes_each = T.cast(count, "int64") * _row_bytes(spec)
        moves.for_each(T.int32(rows_per_slot(spec)), bytes_each, copy_rows)

    @T.prim_func(s_tir=True, private=True)
    def kernel(
        pages: T.handle, length_indptr: T.handle, src_dst_slots: T.handle, batch_size: T.int32
    ):
        T.func_attr({"tirx.is_scheduled": True, "tirx.noalias": True})
        body(pages, length_indptr, src_dst_slots, batch_size)

    return kernel
