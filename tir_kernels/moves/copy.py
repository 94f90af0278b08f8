# SPDX-License-Identifier: Apache-2.0
"""Copies within a pool and out of it: pages, slots in order, slots to dense arrays."""

from __future__ import annotations

from tvm.script import tirx as T

from ..backend import backend_of
from ..layout import K_PLANE, V_PLANE, rows_per_slot, slot_row
from ..spec import ITEMSIZE, KernelSpec


def _row_bytes(spec: KernelSpec) -> int:
    """Bytes that the copy of one row reads and writes."""
    return 2 * spec.qk_head_dim * ITEMSIZE[spec.kv_dtype]


def copy_single_page(spec: KernelSpec):
    """Build the kernel that copies the first `length` slots of a page to another page.

    Arguments: pages ``[P, 2, Hk, page, D]`` (MLA: ``[P, page, D]``), source page, destination page,
    length: int64.
    """
    backend = backend_of(spec)

    def body(pages_handle, source, destination, length) -> None:
        pages = backend.match_pages(pages_handle, spec)

        def copy_rows(i, worker, known) -> None:
            index = backend.read_index(i)
            worker.copy_rows(
                length,
                lambda offset: (pages, slot_row(source, index, offset, spec)),
                lambda offset: (pages, slot_row(destination, index, offset, spec)),
            )

        num_rows = T.int32(rows_per_slot(spec))
        backend.for_items(spec, num_rows, lambda known: length * _row_bytes(spec), copy_rows)

    arguments = {
        "pages": T.handle,
        "source": T.int64,
        "destination": T.int64,
        "length": T.int64,
    }
    return backend.define_kernel(arguments, body)


def copy_pages(spec: KernelSpec):
    """Build the kernel that copies the first slots of pages to other pages.

    Arguments: pages ``[P, 2, Hk, page, D]`` (MLA: ``[P, page, D]``), copies int32 ``[3, n]``: of
    each copy the source page, the destination page and how many slots. They are made in any order,
    so none writes what another one reads or writes.
    """
    backend = backend_of(spec)
    page_rows = rows_per_slot(spec)

    def body(pages_handle, copies_handle) -> None:
        num_copies = T.int64()
        pages = backend.match_pages(pages_handle, spec)
        copies = backend.match(copies_handle, (3, num_copies), "int32")

        def copy_rows(i, worker, known) -> None:
            copy, index = (backend.read_index(f(i, page_rows)) for f in (T.truncdiv, T.truncmod))
            source, destination, length = (backend.read_index(copies[k, copy]) for k in range(3))
            worker.copy_rows(
                length,
                lambda offset: (pages, slot_row(source, index, offset, spec)),
                lambda offset: (pages, slot_row(destination, index, offset, spec)),
            )

        bytes_each = spec.page_size * _row_bytes(spec)
        backend.for_items(spec, num_copies * page_rows, lambda known: bytes_each, copy_rows)

    return backend.define_kernel(dict.fromkeys(("pages", "copies"), T.handle), body)


def debug_get_kv(spec: KernelSpec):
    """Build the kernel that reads slots back into dense arrays.

    Arguments: pages ``[P, 2, Hk, page, D]``, position_map int32 ``[n]`` (slots; a negative one:
    leave the row), k and v ``[num_layers, n, Hk, D]`` of the pages' type, layer: int64.
    """
    backend = backend_of(spec)

    def body(pages_handle, map_handle, k_handle, v_handle, layer) -> None:
        num_rows = T.int64()
        shape = (T.int64(), num_rows, spec.num_kv_heads, spec.qk_head_dim)
        pages = backend.match_pages(pages_handle, spec)
        position_map = backend.match(map_handle, (num_rows,), "int32")
        planes = (
            (K_PLANE, backend.match_rows(k_handle, shape, spec.kv_dtype)),
            (V_PLANE, backend.match_rows(v_handle, shape, spec.kv_dtype)),
        )

        def read_row(n, worker, known) -> None:
            slot = backend.read_index(position_map[n])
            with T.If(slot >= 0), T.Then():
                where = worker.slot(slot)
                for plane, sink in planes:
                    worker.copy_rows(
                        spec.num_kv_heads,
                        lambda h, plane=plane: (pages, where.row(plane, h)),
                        lambda h, sink=sink: (sink, (layer, n, h)),
                    )

        bytes_each = 2 * spec.num_kv_heads * _row_bytes(spec)
        backend.for_items(spec, num_rows, lambda known: bytes_each, read_row)

    arguments = dict.fromkeys(("pages", "position_map", "k", "v"), T.handle)
    return backend.define_kernel(arguments | {"layer": T.int64}, body)


def compact_copy(spec: KernelSpec):
    """Build the kernel that copies slots to other slots, one after the other.

    Arguments: pages ``[P, 2, Hk, page, D]`` (MLA: ``[P, page, D]``), length_indptr int32
    ``[B + 1]``, src_dst_slots int32 ``[2, n]``, batch_size int32. The copies of a head are made in
    order, so a slot may be written and then read; heads do not depend on each other and share out
    the teams, and a thread of a worker always copies the same elements of a row.
    """
    backend = backend_of(spec)

    def body(pages_handle, indptr_handle, slots_handle, batch_size) -> None:
        pages = backend.match_pages(pages_handle, spec)
        indptr = backend.match(indptr_handle, (T.cast(batch_size, "int64") + 1,), "int32")
        slots = backend.match(slots_handle, (2, T.int64()), "int32")

        def read_range():
            begin, end = (backend.read_index(indptr[i]) for i in (0, batch_size))
            return begin, backend.read_index(end - begin)

        def copy_rows(i, worker, known) -> None:
            index, (begin, count) = backend.read_index(i), known
            with T.serial(count) as c:
                source, destination = (worker.slot(slots[row, begin + c]) for row in range(2))
                worker.copy_rows(
                    1,
                    lambda _: (pages, source.indexed_row(index)),
                    lambda _: (pages, destination.indexed_row(index)),
                )

        def bytes_each(known):
            return T.cast(known[1], "int64") * _row_bytes(spec)

        num_rows = T.int32(rows_per_slot(spec))
        backend.for_items(spec, num_rows, bytes_each, copy_rows, once=read_range)

    arguments = dict.fromkeys(("pages", "length_indptr", "src_dst_slots"), T.handle)
    return backend.define_kernel(arguments | {"batch_size": T.int32}, body)
