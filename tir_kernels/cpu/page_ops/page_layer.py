# SPDX-License-Identifier: Apache-2.0
"""Appends to pages that the caller owns: any layout and strides, K and V of any widths."""

from dataclasses import dataclass, field

from tvm.script import tirx as T

from ...define import target_attributes
from ...layout import K_PLANE, V_PLANE
from ...script import inline, prim_func
from ...spec import ITEMSIZE, VectorTarget
from ..worker import copy_row, items
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


@T.meta_class
class Plane:
    """Pages with the rows of K or of V.

    Parameters
    ----------
    spec : PageLayerSpec
    pages : Buffer ``[P, *page]`` or ``[P, 2, *page]``
    plane : tuple
        Indices between the page and its axes: empty, or `K_PLANE` or `V_PLANE`.
    """

    def __init__(self, spec: PageLayerSpec, pages, plane: tuple = ()):
        self.layout, self.lanes, self.pages, self.plane = (
            spec.layout,
            spec.target.lanes,
            pages,
            plane,
        )

    def slot(self, page, offset, h) -> tuple:
        """Return the indices of a row, less the last axis."""
        at = {"N": (offset,), "H": (h,), "D": ()}
        return (page, *self.plane, *(index for axis in self.layout for index in at[axis]))

    @inline
    def put(self, rows, n, page, offset, num_heads):
        """Copy row `n` of every head to slot `offset` of `page`."""
        if self.layout == "ND":
            copy_row(rows, (n,), self.pages, self.slot(page, offset, None), self.lanes, 0)
        else:
            for h in range(num_heads):
                copy_row(rows, (n, h), self.pages, self.slot(page, offset, h), self.lanes, 0)


def append(spec: PageLayerSpec):
    """Build the kernel that writes rows of K and V to their slots.

    Arguments: the pages, k ``[T, H, k_dim]`` and v ``[T, H, v_dim]`` (layout "ND": without H),
    slots int32 ``[T, 2]`` (page, offset in it; a negative page: do not write). The pages are one
    tensor ``[P, 2, *page]`` or two, ``[P, *page]``, with the axes of the layout. All but the slots
    may have any strides that leave rows contiguous. No two rows should have one slot.
    """
    dtype, kv_dtype, k_dim, v_dim = spec.dtype, spec.kv_dtype, spec.k_dim, spec.v_dim
    row_bytes = (k_dim + v_dim) * (ITEMSIZE[dtype] + ITEMSIZE[kv_dtype])
    unused = ("k_pages", "v_pages") if spec.is_fused else ("pages",)

    @prim_func(absent=unused)
    def append(
        pages: T.handle,
        k_pages: T.handle,
        v_pages: T.handle,
        var_k: T.handle,
        var_v: T.handle,
        var_slots: T.handle,
    ):
        T.func_attr(target_attributes(on_cpu=True))
        num_rows, num_pages, page_size, num_heads = T.int64(), T.int64(), T.int64(), T.int64()
        axes = T.meta_var({"P": num_pages, "N": page_size, "H": num_heads})
        heads = T.meta_var(() if spec.layout == "ND" else (num_heads,))
        k = match_strided(var_k, (num_rows, *heads, k_dim), dtype)
        v = match_strided(var_v, (num_rows, *heads, v_dim), dtype)
        if spec.is_fused:
            both = match_strided(pages, _shape(spec, axes, k_dim, (2,)), kv_dtype)
            k_plane = T.meta_var(Plane(spec, both, (K_PLANE,)))
            v_plane = T.meta_var(Plane(spec, both, (V_PLANE,)))
        else:
            k_plane = Plane(spec, match_strided(k_pages, _shape(spec, axes, k_dim), kv_dtype))
            v_plane = Plane(spec, match_strided(v_pages, _shape(spec, axes, v_dim), kv_dtype))
        slots = match(var_slots, (num_rows, 2), "int32")
        heads_of_row = T.meta_var(T.int64(1) if spec.layout == "ND" else num_heads)
        for n in items(num_rows, heads_of_row * row_bytes):
            page, offset = T.cast(slots[n, 0], "int64"), T.cast(slots[n, 1], "int64")
            if page >= 0:
                k_plane.put(k, n, page, offset, num_heads)
                v_plane.put(v, n, page, offset, num_heads)

    return append


def _shape(spec: PageLayerSpec, axes: dict, width: int, planes: tuple = ()) -> tuple:
    """Return the shape of pages whose rows have `width` elements."""
    return (axes["P"], *planes, *(width if axis == "D" else axes[axis] for axis in spec.layout))
