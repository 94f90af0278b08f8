# SPDX-License-Identifier: Apache-2.0
"""Appends to pages that the caller owns: any layout and strides, K and V of any widths."""

from __future__ import annotations

from dataclasses import dataclass, field

from tvm.script import tirx as T

from ...layout import K_PLANE, V_PLANE
from ...spec import ITEMSIZE, VectorTarget
from .. import simd
from ..components.rows import copy_row, items
from .arrays import match, match_strided

# Axes of a page; N: slots, H: heads, D: elements of a row.
LAYOUTS = ("NHD", "HND", "ND")


@dataclass(frozen=True)
class PageLayerSpec:
    """The spec of an append; pages, slots of a page and heads may be any number.

    Parameters
    ----------
    k_dim, v_dim : int
        Widths of the rows of the two planes (K and V, or ckv and kpe).
    dtype, kv_dtype : str
        Type of the appended rows and of the pages.
    layout : {"NHD", "HND", "ND"}
        Axes of a page; "ND" has no heads.
    is_fused : bool
        Whether both planes lie in one tensor, ``[P, 2, ...]``.
    target : VectorTarget
    """

    k_dim: int
    v_dim: int
    dtype: str = "float32"
    kv_dtype: str = "float32"
    layout: str = "NHD"
    is_fused: bool = False
    target: VectorTarget = field(default_factory=VectorTarget)


def append(spec: PageLayerSpec):
    """Build the kernel that writes rows of K and V to their slots.

    Arguments: the pages, k ``[T, H, k_dim]`` and v ``[T, H, v_dim]`` (layout "ND": without H),
    slots int32 ``[T, 2]`` (page, offset in it; a negative page: do not write). The pages are one
    tensor ``[P, 2, *page]`` or two, ``[P, *page]``, with the axes of the layout. All but the slots
    may have any strides that leave rows contiguous. No two rows should have one slot.
    """

    def body(pages_handles, k_handle, v_handle, slots_handle) -> None:
        num_rows = T.int64()
        outer = {"P": T.int64(), "N": T.int64()}
        if spec.layout != "ND":
            outer["H"] = T.int64()
        num_heads = outer.get("H", 1)
        planes = [
            _Plane(spec, handle, width, num_rows, outer)
            for handle, width in ((k_handle, spec.k_dim), (v_handle, spec.v_dim))
        ]
        if spec.is_fused:
            shape = (outer["P"], 2, *_page_shape(spec, outer, spec.k_dim))
            pages = match_strided(pages_handles[0], shape, spec.kv_dtype)
            for plane, index in zip(planes, (K_PLANE, V_PLANE), strict=True):
                plane.pages, plane.prefix = pages, (index,)
        else:
            for plane, handle in zip(planes, pages_handles, strict=True):
                shape = (outer["P"], *_page_shape(spec, outer, plane.width))
                plane.pages = match_strided(handle, shape, spec.kv_dtype)
        slots = match(slots_handle, (num_rows, 2), "int32")

        def append_row(n) -> None:
            page = simd.temp(T.cast(slots[n, 0], "int64"), 1, "int64")
            offset = simd.temp(T.cast(slots[n, 1], "int64"), 1, "int64")
            with T.If(page >= T.int64(0)), T.Then():
                for plane in planes:
                    plane.copy_row(n, page, offset, num_heads)

        row_bytes = (spec.k_dim + spec.v_dim) * (ITEMSIZE[spec.dtype] + ITEMSIZE[spec.kv_dtype])
        with items(num_rows, num_heads * row_bytes) as n:
            append_row(n)

    if spec.is_fused:

        @T.prim_func(s_tir=True, private=True)
        def kernel(pages: T.handle, k: T.handle, v: T.handle, slots: T.handle):
            T.func_attr({"tirx.is_scheduled": True, "tirx.noalias": True})
            body((pages,), k, v, slots)
    else:

        @T.prim_func(s_tir=True, private=True)
        def kernel(k_pages: T.handle, v_pages: T.handle, k: T.handle, v: T.handle, slots: T.handle):
            T.func_attr({"tirx.is_scheduled": True, "tirx.noalias": True})
            body((k_pages, v_pages), k, v, slots)

    return kernel


def _page_shape(spec: PageLayerSpec, outer: dict, width: int) -> tuple:
    return tuple(width if axis == "D" else outer[axis] for axis in spec.layout)


class _Plane:
    """The rows of K or of V, and where they go."""

    def __init__(self, spec: PageLayerSpec, rows_handle, width: int, num_rows, outer: dict):
        self.spec, self.width = spec, width
        heads = (outer["H"],) if "H" in outer else ()
        self.rows = match_strided(rows_handle, (num_rows, *heads, width), spec.dtype)
        self.pages, self.prefix = None, ()

    def copy_row(self, n, page, offset, num_heads) -> None:
        """Copy row `n` of every head to slot `offset` of `page`."""

        def copy_head(h) -> None:
            at = {"N": (offset,), "H": (h,), "D": ()}
            slot = tuple(index for axis in self.spec.layout for index in at[axis])
            source = (n,) if self.spec.layout == "ND" else (n, h)
            sink = (page, *self.prefix, *slot)
            copy_row(self.rows, source, self.pages, sink, self.spec.target.lanes, 0)

        if self.spec.layout == "ND":
            copy_head(None)
        else:
            with T.serial(num_heads) as h:
                copy_head(h)
