# SPDX-License-Identifier: Apache-2.0
"""The latent rows of MLA: written to their slots, and read back."""

from tvm.script import tirx as T

from ..backend import backend_of
from ..define import I32, aligned, attributes
from ..layout import match_pages, row_bytes, view_pages
from ..script import prim_func
from ..spec import ITEMSIZE, KernelSpec


def transpose_append_mla(spec: KernelSpec):
    """Build the kernel that writes latent rows to their slots.

    Arguments: pages ``[P, page, D]``, kv ``[T, D]``, position_map int32 ``[T]`` (slots; a negative
    one: do not write).
    """
    rows = aligned(spec, spec.dtype)

    @prim_func
    def transpose_append_mla(var_pages: T.handle, var_kv: T.handle, var_position_map: T.handle):
        T.func_attr(attributes(spec))
        num_pages, n = T.int32(), T.int64()
        pages = match_pages(var_pages, num_pages, spec)
        kv = T.match_buffer(var_kv, (n, spec.qk_head_dim), elem_offset=T.int64(), **rows)
        position_map = T.match_buffer(var_position_map, (n,), elem_offset=T.int64(), **I32)
        _append_rows(spec, n, pages, kv, position_map)

    return transpose_append_mla


def _append_rows(spec: KernelSpec, num_rows, pages, kv, position_map) -> None:
    backend, pages = backend_of(spec), view_pages(pages, spec)

    def append_row(n, worker, known) -> None:
        slot = backend.read_index(position_map[n])
        with T.If(slot >= 0), T.Then():
            sink = worker.slot(slot).indexed_row(0)
            worker.copy_rows(1, lambda _: (kv, (n,)), lambda _: (pages, sink))

    bytes_each = spec.qk_head_dim * ITEMSIZE[spec.dtype] + row_bytes(spec)
    backend.for_items(spec, num_rows, lambda known: bytes_each, append_row)


def debug_get_kv_mla(spec: KernelSpec):
    """Build the kernel that reads slots back into a dense array.

    Arguments: pages ``[P, page, D]``, position_map int32 ``[n]`` (slots; a negative one: leave the
    row), kv ``[num_layers, n, D]`` of type `KernelSpec.row_dtype`, layer:
    int64.
    """
    rows = aligned(spec, spec.row_dtype)

    @prim_func
    def debug_get_kv_mla(
        var_pages: T.handle, var_position_map: T.handle, var_kv: T.handle, layer: T.int64
    ):
        T.func_attr(attributes(spec))
        num_pages, num_layers, n = T.int32(), T.int64(), T.int64()
        pages = match_pages(var_pages, num_pages, spec)
        position_map = T.match_buffer(var_position_map, (n,), elem_offset=T.int64(), **I32)
        kv = T.match_buffer(
            var_kv, (num_layers, n, spec.qk_head_dim), elem_offset=T.int64(), **rows
        )
        _read_rows(spec, n, pages, position_map, kv, layer)

    return debug_get_kv_mla


def _read_rows(spec: KernelSpec, num_rows, pages, position_map, kv, layer) -> None:
    backend, pages = backend_of(spec), view_pages(pages, spec)

    def read_row(n, worker, known) -> None:
        slot = backend.read_index(position_map[n])
        with T.If(slot >= 0), T.Then():
            source = worker.slot(slot).indexed_row(0)
            worker.copy_rows(1, lambda _: (pages, source), lambda _: (kv, (layer, n)))

    bytes_each = row_bytes(spec) + spec.qk_head_dim * ITEMSIZE[spec.row_dtype]
    backend.for_items(spec, num_rows, lambda known: bytes_each, read_row)
