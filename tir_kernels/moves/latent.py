# SPDX-License-Identifier: Apache-2.0
"""The latent rows of MLA: written to their slots, and read back."""

from __future__ import annotations

from tvm.script import tirx as T

from ..backend import backend_of
from ..spec import ITEMSIZE, KernelSpec


def transpose_append_mla(spec: KernelSpec):
    """Build the kernel that writes latent rows to their slots.

    Arguments: pages ``[P, page, D]``, kv ``[T, D]``, position_map int32 ``[T]`` (slots; a negative
    one: do not write).
    """
    backend = backend_of(spec)
    row_bytes = spec.qk_head_dim * (ITEMSIZE[spec.dtype] + ITEMSIZE[spec.kv_dtype])

    def body(pages_handle, kv_handle, map_handle) -> None:
        num_rows = T.int64()
        pages = backend.match_pages(pages_handle, spec)
        kv = backend.match_rows(kv_handle, (num_rows, spec.qk_head_dim), spec.dtype)
        position_map = backend.match(map_handle, (num_rows,), "int32")

        def append_row(n, worker, known) -> None:
            slot = backend.read_index(position_map[n])
            with T.If(slot >= 0), T.Then():
                sink = worker.slot(slot).indexed_row(0)
                worker.copy_rows(1, lambda _: (kv, (n,)), lambda _: (pages, sink))

        backend.for_items(spec, num_rows, lambda known: row_bytes, append_row)

    return backend.define_kernel(dict.fromkeys(("pages", "kv", "position_map"), T.handle), body)


def debug_get_kv_mla(spec: KernelSpec):
    """Build the kernel that reads slots back into a dense array.

    Arguments: pages ``[P, page, D]``, position_map int32 ``[n]`` (slots; a negative one: leave the
    row), kv ``[num_layers, n, D]`` of the pages' type, layer: int64.
    """
    backend = backend_of(spec)
    row_bytes = 2 * spec.qk_head_dim * ITEMSIZE[spec.kv_dtype]

    def body(pages_handle, map_handle, kv_handle, layer) -> None:
        num_rows = T.int64()
        pages = backend.match_pages(pages_handle, spec)
        position_map = backend.match(map_handle, (num_rows,), "int32")
        shape = (T.int64(), num_rows, spec.qk_head_dim)
        kv = backend.match_rows(kv_handle, shape, spec.kv_dtype)

        def read_row(n, worker, known) -> None:
            slot = backend.read_index(position_map[n])
            with T.If(slot >= 0), T.Then():
                source = worker.slot(slot).indexed_row(0)
                worker.copy_rows(1, lambda _: (pages, source), lambda _: (kv, (layer, n)))

        backend.for_items(spec, num_rows, lambda known: row_bytes, read_row)

    arguments = dict.fromkeys(("pages", "position_map", "kv"), T.handle)
    return backend.define_kernel(arguments | {"layer": T.int64}, body)
