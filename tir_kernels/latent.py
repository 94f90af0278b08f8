# SPDX-License-Identifier: Apache-2.0
"""The latent rows of MLA: written to their slots, and read back."""

from __future__ import annotations

from tvm.script import tirx as T

from .cpu import moves, simd
from .spec import ITEMSIZE, KernelSpec


def transpose_append_mla(spec: KernelSpec):
    """Build the kernel that writes latent rows to their slots.

    Arguments: pages ``[P, page, D]``, kv ``[T, D]``, position_map int32 ``[T]`` (slots; a negative
    one: do not write).
    """
    row_bytes = spec.qk_head_dim * (ITEMSIZE[spec.dtype] + ITEMSIZE[spec.kv_dtype])

    def body(pages_handle, kv_handle, map_handle) -> None:
        num_rows = T.int64()
        pages = moves.match_pages(pages_handle, spec)
        kv = moves.match(kv_handle, (num_rows, spec.qk_head_dim), spec.dtype)
        position_map = moves.match(map_handle, (num_rows,), "int32")

        def append_row(n) -> None:
            slot = simd.index_temp(position_map[n])
            with T.If(slot >= 0), T.Then():
                sink = moves.Slot(slot, spec).indexed_row(0)
                moves.copy_row(kv, (n,), pages, sink, spec.target.lanes)

        moves.for_each(num_rows, row_bytes, append_row)

    @T.prim_func(s_tir=True, private=True)
    def kernel(pages: T.handle, kv: T.handle, position_map: T.handle):
        T.func_attr({"tirx.is_scheduled": True, "tirx.noalias": True})
        body(pages, kv, position_map)

    return kernel


def debug_get_kv_mla(spec: KernelSpec):
    """Build the kernel that reads slots back into a dense array.

    Arguments: pages ``[P, page, D]``, position_map int32 ``[n]`` (slots; a negative one: leave the
    row), kv ``[num_layers, n, D]`` of the pages' type, layer: int64.
    """

    def body(pages_handle, map_handle, kv_handle, layer) -> None:
        num_rows = T.int64()
        pages = moves.match_pages(pages_handle, spec)
        position_map = moves.match(map_handle, (num_rows,), "int32")
        kv = moves.match(kv_handle, (T.int64(), num_rows, spec.qk_head_dim), spec.kv_dtype)

        def read_row(n) -> None:
            slot = simd.index_temp(position_map[n])
            with T.If(slot >= 0), T.Then():
                source = moves.Slot(slot, spec).indexed_row(0)
                moves.copy_row(pages, source, kv, (layer, n), spec.target.lanes)

        moves.for_each(num_rows, 2 * spec.qk_head_dim * ITEMSIZE[spec.kv_dtype], read_row)

    @T.prim_func(s_tir=True, private=True)
    def kernel(pages: T.handle, position_map: T.handle, kv: T.handle, layer: T.int64):
        T.func_attr({"tirx.is_scheduled": True, "tirx.noalias": True})
        body(pages, position_map, kv, layer)

    return kernel
