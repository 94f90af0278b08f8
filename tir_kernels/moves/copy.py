# SPDX-License-Identifier: Apache-2.0
"""Copies within a pool and out of it: pages, slots in order, slots to dense arrays."""

from tvm.script import tirx as T

from ..backend import backend_of
from ..define import I32, aligned, attributes
from ..layout import (
    K_PLANE,
    V_PLANE,
    for_row_set,
    match_pages,
    row_bytes,
    rows_per_slot,
    view_pages,
)
from ..script import prim_func
from ..spec import ITEMSIZE, KernelSpec


def _row_bytes(spec: KernelSpec) -> int:
    """Bytes that the copy of one row reads and writes."""
    return 2 * row_bytes(spec)


def copy_single_page(spec: KernelSpec):
    """Build the kernel that copies the first `length` slots of a page to another page.

    Arguments: pages ``[P, 2, Hk, page, D]`` (MLA: ``[P, page, D]``), source page, destination page,
    length: int64.
    """

    @prim_func
    def copy_single_page(
        var_pages: T.handle, source: T.int64, destination: T.int64, length: T.int64
    ):
        T.func_attr(attributes(spec))
        num_pages = T.int32()
        pages = match_pages(var_pages, num_pages, spec)
        _copy_page(spec, pages, source, destination, length)

    return copy_single_page


def _copy_page(spec: KernelSpec, pages, source, destination, length) -> None:
    """Copy each of a page's row sets, such as K of a head, at a time."""
    backend, pages = backend_of(spec), view_pages(pages, spec)

    def copy_rows(i, worker, known) -> None:
        for_row_set(
            backend.read_index(i),
            spec,
            lambda row: worker.copy_rows(
                length,
                lambda offset: (pages, row(source, offset)),
                lambda offset: (pages, row(destination, offset)),
            ),
        )

    num_rows = T.int32(rows_per_slot(spec))
    backend.for_items(spec, num_rows, lambda known: length * _row_bytes(spec), copy_rows)


def copy_pages(spec: KernelSpec):
    """Build the kernel that copies the first slots of pages to other pages.

    Arguments: pages ``[P, 2, Hk, page, D]`` (MLA: ``[P, page, D]``), copies int32 ``[3, n]``: of
    each copy the source page, the destination page and the number of slots. They are made in any
    order, so none writes what another one reads or writes.
    """

    @prim_func
    def copy_pages(var_pages: T.handle, var_copies: T.handle):
        T.func_attr(attributes(spec))
        num_pages, n = T.int32(), T.int64()
        pages = match_pages(var_pages, num_pages, spec)
        copies = T.match_buffer(var_copies, (3, n), elem_offset=T.int64(), **I32)
        _copy_pages(spec, n, pages, copies)

    return copy_pages


def _copy_pages(spec: KernelSpec, num_copies, pages, copies) -> None:
    backend, pages = backend_of(spec), view_pages(pages, spec)
    page_rows = rows_per_slot(spec)

    def copy_rows(i, worker, known) -> None:
        copy, index = (backend.read_index(f(i, page_rows)) for f in (T.truncdiv, T.truncmod))
        source, destination, length = (backend.read_index(copies[k, copy]) for k in range(3))
        for_row_set(
            index,
            spec,
            lambda row: worker.copy_rows(
                length,
                lambda offset: (pages, row(source, offset)),
                lambda offset: (pages, row(destination, offset)),
            ),
        )

    bytes_each = spec.page_size * _row_bytes(spec)
    backend.for_items(spec, num_copies * page_rows, lambda known: bytes_each, copy_rows)


def debug_get_kv(spec: KernelSpec):
    """Build the kernel that reads slots back into dense arrays.

    Arguments: pages ``[P, 2, Hk, page, D]``, position_map int32 ``[n]`` (slots; a negative one:
    leave the row), k and v ``[num_layers, n, Hk, D]`` of type `KernelSpec.row_dtype`, layer: int64.
    """
    rows, row = aligned(spec, spec.row_dtype), (spec.num_kv_heads, spec.qk_head_dim)

    @prim_func
    def debug_get_kv(
        var_pages: T.handle,
        var_position_map: T.handle,
        var_k: T.handle,
        var_v: T.handle,
        layer: T.int64,
    ):
        T.func_attr(attributes(spec))
        num_pages, num_layers, n = T.int32(), T.int64(), T.int64()
        pages = match_pages(var_pages, num_pages, spec)
        position_map = T.match_buffer(var_position_map, (n,), elem_offset=T.int64(), **I32)
        k = T.match_buffer(var_k, (num_layers, n, *row), elem_offset=T.int64(), **rows)
        v = T.match_buffer(var_v, (num_layers, n, *row), elem_offset=T.int64(), **rows)
        _read_slots(spec, n, pages, position_map, {K_PLANE: k, V_PLANE: v}, layer)

    return debug_get_kv


def _read_slots(spec: KernelSpec, num_rows, pages, position_map, planes: dict, layer) -> None:
    backend, pages = backend_of(spec), view_pages(pages, spec)

    def read_row(n, worker, known) -> None:
        slot = backend.read_index(position_map[n])
        with T.If(slot >= 0), T.Then():
            where = worker.slot(slot)
            for plane, sink in planes.items():
                worker.copy_rows(
                    spec.num_kv_heads,
                    lambda h, plane=plane: (pages, where.row(plane, h)),
                    lambda h, sink=sink: (sink, (layer, n, h)),
                )

    row = row_bytes(spec) + spec.qk_head_dim * ITEMSIZE[spec.row_dtype]
    bytes_each = 2 * spec.num_kv_heads * row
    backend.for_items(spec, num_rows, lambda known: bytes_each, read_row)


def compact_copy(spec: KernelSpec):
    """Build the kernel that copies slots to other slots, one after the other.

    Arguments: pages ``[P, 2, Hk, page, D]`` (MLA: ``[P, page, D]``), length_indptr int32
    ``[B + 1]``, src_dst_slots int32 ``[2, n]``, batch_size int32. The copies of a head are made in
    order, so a slot may be written and then read. Heads do not depend on each other: workers share
    them, and a thread of a worker always copies the same elements of a row.
    """

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
        length_indptr = T.match_buffer(
            var_length_indptr,
            (T.cast(batch_size, "int64") + 1,),
            elem_offset=T.int64(),
            **I32,
        )
        src_dst_slots = T.match_buffer(var_src_dst_slots, (2, n), elem_offset=T.int64(), **I32)
        _copy_slots(spec, batch_size, pages, length_indptr, src_dst_slots)

    return compact_copy


def _copy_slots(spec: KernelSpec, batch_size, pages, indptr, slots) -> None:
    backend, pages = backend_of(spec), view_pages(pages, spec)

    def read_range():
        begin, end = (backend.read_index(indptr[i]) for i in (0, batch_size))
        return begin, backend.read_index(end - begin)

    def copy_rows(i, worker, known) -> None:
        index, (begin, count) = backend.read_index(i), known
        with T.serial(count) as c:
            source, destination = (worker.slot(slots[row, begin + c]) for row in range(2))
            for_row_set(
                index,
                spec,
                lambda row: worker.copy_rows(
                    1,
                    lambda _: (pages, row(source.page, source.offset)),
                    lambda _: (pages, row(destination.page, destination.offset)),
                ),
            )

    def bytes_each(known):
        return T.cast(known[1], "int64") * _row_bytes(spec)

    num_rows = T.int32(rows_per_slot(spec))
    backend.for_items(spec, num_rows, bytes_each, copy_rows, once=read_range)
