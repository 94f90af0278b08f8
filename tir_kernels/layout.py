# SPDX-License-Identifier: Apache-2.0
"""The shape of a page, and the indices of its rows, for all kernels.

Where the bits of quantized rows lie in a page comes from `codec.py`, which NumPy
(`cache/page_format.py` of the package) asks too. C++ spells the same layout
(`runtime_ext/storage/slot_layout.h`), and `PageFormat.shape` the shape: change the three together.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from tvm.script import tirx as T
from tvm.script.ir_builder import IRBuilder

from .codec import Codec
from .define import ACCESS_BYTES, aligned
from .spec import ITEMSIZE, GpuTarget, KernelSpec
from .vectors import F32

K_PLANE, V_PLANE = 0, 1


def first_element():
    """A variable for where the elements of a buffer begin in its allocation.

    It has 64 bits, and that is what gives the offsets of all elements 64 bits: TVM computes an
    offset from this and from the indices, each of them widened to the type of this before it is
    multiplied. A pool may have more than 2**31 elements, though pages, slots and rows are counted
    in 32 bits. Every buffer of pages or rows is matched with it.
    """
    return T.int64()


def page_shape(spec: KernelSpec) -> tuple[int, ...]:
    """Shape of one page: ``(2, num_kv_heads, page_size, head_dim)``, K rows, then V rows.

    With MLA ``(page_size, head_dim)``. Where K and V have rows of two widths, a page is flat:
    ``(num_kv_heads * page_size * (qk_head_dim + v_head_dim),)``, the rows of K, then those of V.
    """
    if spec.has_two_widths:
        return (spec.num_kv_heads * spec.page_size * (spec.qk_head_dim + spec.v_head_dim),)
    row_sets = () if spec.is_latent else (2, spec.num_kv_heads)
    return (*row_sets, spec.page_size, spec.qk_head_dim)


def pages_shape(num_pages, spec: KernelSpec) -> tuple:
    """Shape of a layer's pool whose rows are not quantized: ``(num_pages, *page_shape)``."""
    return (num_pages, *page_shape(spec))


def row_bytes(spec: KernelSpec) -> int:
    """Bytes that a row takes in a page, its scales included: the mean of K and V."""
    codec = spec.codec
    if codec is None:
        width = (spec.qk_head_dim + spec.v_head_dim) // 2 if spec.has_two_widths else None
        return (width or spec.qk_head_dim) * ITEMSIZE[spec.kv_dtype]
    widths = spec.qk_head_dim, spec.v_head_dim
    rows = [c.row_bytes(widths[0]) + c.scale_bytes(*widths) for c in (codec.k, codec.v)]
    return sum(rows) // 2


def match_pages(handle, num_pages, spec: KernelSpec):
    """Match the pool of a layer: `pages_shape` of `kv_dtype`, or uint8 ``[num_pages, page_bytes]``.

    Quantized pages start at a multiple of 4 bytes, on GPUs of 16; see `view_pages`.
    """
    if spec.codec is None:
        shape, options = pages_shape(num_pages, spec), aligned(spec, spec.kv_dtype)
    else:
        align = ACCESS_BYTES if isinstance(spec.target, GpuTarget) else ITEMSIZE[F32]
        shape = (num_pages, page_bytes(spec))
        options = {"dtype": "uint8", "align": align, "offset_factor": align}
    return T.match_buffer(handle, shape, elem_offset=first_element(), **options)


def page_bytes(spec: KernelSpec) -> int:
    """Bytes of a quantized page."""
    spec.codec.check_row(spec.qk_head_dim, spec.v_head_dim)
    num_rows = rows_per_slot(spec) * spec.page_size
    return spec.codec.page_bytes(num_rows, spec.qk_head_dim, spec.v_head_dim)


def view_pages(pages, spec: KernelSpec):
    """Return the object whose rows kernels read and write.

    These are the matched pages, `TwoWidths` or `QuantizedPages`. To be called once, after all
    arguments are matched.
    """
    if spec.has_two_widths:
        return TwoWidths.of(pages, spec)
    return pages if spec.codec is None else QuantizedPages.of(pages, spec)


def rows_of(pages, plane: int):
    """Return the rows of K or V among what `view_pages` returns."""
    return pages.of_plane(plane) if isinstance(pages, QuantizedPages | TwoWidths) else pages


def arrays_of(pages) -> tuple:
    """Return the buffers among what `view_pages` returns; none of quantized pages."""
    if isinstance(pages, QuantizedPages):
        return ()
    return (pages.k, pages.v) if isinstance(pages, TwoWidths) else (pages,)


@dataclass(frozen=True)
class TwoWidths:
    """Rows of two widths in one array, as two views of it. The same indices hold for both.

    In pages the rows are those of K and those of V. In fused rows they are those of Q and K, and
    those of V.

    Parameters
    ----------
    k, v : Buffer
        Pages: ``[num_pages, 2, num_kv_heads, page_size, width]``, of which each view has one plane.
        Fused rows: ``[rows, heads, width]``, where the heads of V count from those of K on.
    """

    k: Any
    v: Any

    @staticmethod
    def of(pages, spec: KernelSpec) -> TwoWidths:
        """Make the views of a buffer that `match_pages` has matched."""
        num_pages, page_elements = pages.shape
        num_rows = spec.num_kv_heads * spec.page_size
        plane = num_rows * spec.qk_head_dim  # from the rows of K to those of V

        def view(name: str, width: int):
            shape = (num_pages, 2, spec.num_kv_heads, spec.page_size, width)
            strides = (int(page_elements), plane, spec.page_size * width, width, 1)
            return strided_view(name, pages, shape, strides)

        return TwoWidths(view("k_rows", spec.qk_head_dim), view("v_rows", spec.v_head_dim))

    @staticmethod
    def fused(rows, spec: KernelSpec) -> TwoWidths:
        """Make the views of fused rows ``[T, Hq * Dqk + Hk * Dqk + Hk * Dv]``."""
        num_rows, row_elements = rows.shape
        num_keys = spec.num_qo_heads + spec.num_kv_heads
        widths = spec.qk_head_dim, spec.v_head_dim
        first = num_keys * (widths[0] - widths[1])  # so that head `num_keys` is the first of V

        def view(name: str, num_heads: int, width: int, begin: int):
            shape, strides = (num_rows, num_heads, width), (int(row_elements), width, 1)
            return strided_view(name, rows, shape, strides, begin)

        return TwoWidths(
            view("qk_rows", num_keys, widths[0], 0),
            view("v_rows", num_keys + spec.num_kv_heads, widths[1], first),
        )

    @property
    def dtype(self):
        """Return the type of the elements."""
        return self.k.dtype

    def of_plane(self, plane: int):
        """Return the view with the rows of K (fused: and of Q), or of V."""
        return self.v if plane == V_PLANE else self.k


def strided_view(name: str, buffer, shape: tuple, strides: tuple, begin: int = 0):
    """Declare a view of the elements of a buffer, from element `begin` on."""
    view = T.decl_buffer(
        shape,
        str(buffer.dtype),
        data=buffer.data,
        strides=[T.int64(stride) for stride in strides],
        elem_offset=buffer.elem_offset + begin,
        align=buffer.data_alignment,
        offset_factor=buffer.offset_factor,
        layout=None,  # or GPUs take one without strides
    )
    IRBuilder.name(name, view)
    return view


@dataclass(frozen=True)
class QuantizedPages:
    """The codes and the scales of quantized pages: two views of one array of bytes.

    Parameters
    ----------
    spec : KernelSpec
        With a codec.
    codec : Codec
        The format of these rows.
    codes : Buffer, of the codec's `storage_dtype`
        ``[num_pages, *row_sets, page_size, row_bytes]``, see `page_shape`.
    scales : Buffer, float32, or uint16: the bits of bfloat16 numbers
        ``[num_pages, *row_sets, page_size, num_groups]``
    v : QuantizedPages, optional
        What the rows of V are in, where they have a codec of their own. The same indices hold for
        both, but only the rows of one plane are in each.
    """

    spec: KernelSpec
    codec: Codec
    codes: Any
    scales: Any
    v: QuantizedPages | None = None

    dtype = "uint8"  # of the array

    @staticmethod
    def of(pages, spec: KernelSpec) -> QuantizedPages:
        """Make the views of a buffer that `match_pages` has matched."""
        shape, widths = page_shape(spec)[:-1], (spec.qk_head_dim, spec.v_head_dim)
        num_pages, stride = pages.shape
        sections = spec.codec.sections(rows_per_slot(spec) * spec.page_size, *widths)

        def view(name: str, width: int, dtype: str, itemsize: int, begin: int, plane: int):
            """A view with elements of `itemsize`; `begin` and `plane`, its stride, are bytes."""
            strides, extent = [T.int64(1)], width
            for size in reversed(shape):
                strides.insert(0, T.int64(extent))
                extent *= size
            if len(shape) > 1:
                strides[0] = T.int64(plane // itemsize)
            buffer = T.decl_buffer(
                (num_pages, *shape, width),
                dtype,
                data=pages.data,
                strides=[T.int64(int(stride) // itemsize), *strides],
                elem_offset=pages.elem_offset // itemsize + begin // itemsize,
                align=itemsize,
                layout=None,  # or GPUs take one without strides
            )
            IRBuilder.name(name, buffer)
            return buffer

        def plane_bytes(first: slice, last: slice) -> int:
            """Bytes from the first row of K to the first one of V, in one section or in two."""
            return last.start - first.start or (first.stop - first.start) // 2

        k, v = sections[0], sections[-1]
        code_plane, scale_plane = plane_bytes(k.codes, v.codes), plane_bytes(k.scales, v.scales)

        def of_codec(codec: Codec, suffix: str, v: QuantizedPages | None) -> QuantizedPages:
            dtype, itemsize = {"float32": (F32, 4), "bfloat16": ("uint16", 2)}[codec.scale_dtype]
            row, num_groups = codec.row_bytes(widths[0]), len(codec.groups(*widths))
            codes = view("codes" + suffix, row, codec.storage_dtype, 1, 0, code_plane)
            begin = k.scales.start
            scales = view("scales" + suffix, num_groups, dtype, itemsize, begin, scale_plane)
            return QuantizedPages(spec, codec, codes, scales, v)

        of_v = of_codec(v.codec, "_v", None) if v is not k else None
        return of_codec(k.codec, "", of_v)

    def of_plane(self, plane: int) -> QuantizedPages:
        """Return the storage of the rows of K or V."""
        return self.v if self.v is not None and plane == V_PLANE else self

    @property
    def scales_begin(self) -> int:
        """The first byte of a page behind its codes, where K and V have one codec."""
        spec, num_rows = self.spec, rows_per_slot(self.spec) * self.spec.page_size
        (section,) = self.codec.sections(num_rows, spec.qk_head_dim, spec.v_head_dim)
        return section.scales.start

    @cached_property
    def groups(self) -> tuple[tuple[int, int], ...]:
        """Columns ``(begin, end)`` of each group of a row."""
        return self.codec.groups(self.spec.qk_head_dim, self.spec.v_head_dim)

    def group_of(self, column):
        """The group of a column: an int for an int, an expression for one."""
        if self.codec.group_size:
            return column // self.codec.group_size
        if len(self.groups) == 1:
            return 0
        begin = self.groups[1][0]
        return int(column >= begin) if isinstance(column, int) else T.Select(column < begin, 0, 1)

    def scale(self, row: Sequence, group):
        """The scale of a group of the row at indices `row`, less the last axis: float32."""
        value = self.scales[(*row, group)]
        if str(self.scales.dtype) == F32:
            return value
        return T.reinterpret(F32, T.shift_left(T.cast(value, "uint32"), T.uint32(16)))


def rows_per_slot(spec: KernelSpec) -> int:
    """Rows that a slot holds: K and V of each head, or the latent row of MLA."""
    return 1 if spec.is_latent else 2 * spec.num_kv_heads


def slot_row(page, index, offset, spec: KernelSpec) -> tuple:
    """Indices, less the last axis, of row `index` of ``rows_per_slot`` at slot `offset`."""
    if spec.is_latent:
        return (page, offset)
    return (page, index // spec.num_kv_heads, index % spec.num_kv_heads, offset)


def row_index(page, plane, head, offset, dim) -> tuple:
    """Index of element `dim` of the row that `head` keeps at slot `offset` of `page`."""
    return (page, plane, head, offset, dim)


def latent_index(page, offset, dim) -> tuple:
    """Index of element `dim` of the latent row of MLA at slot `offset` of `page`."""
    return (page, offset, dim)


def slot_page(slot, page_size):
    """Page of a slot (``slot = page * page_size + offset``)."""
    return slot // page_size


def slot_offset(slot, page_size):
    """Offset of a slot within its page."""
    return slot % page_size
