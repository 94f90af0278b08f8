# SPDX-License-Identifier: Apache-2.0
"""The arguments of the attention kernels: every name has one type and shape, in all of them.

A kernel is a list of names and a function that emits its body. The names are matched here, with no
more alignment than is certain, so that a kernel says only which arguments it takes.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace

from tvm import tirx
from tvm.script import tirx as T
from tvm.script.ir_builder import IRBuilder

from .layout import first_element, pages_shape
from .spec import ITEMSIZE, KernelSpec
from .vectors import F32

PAGES = ("pages", "page_indptr", "page_values", "length_info")
WINDOWED_PAGES = (*PAGES[:3], "window_info")
POSITIONS = ("k_rope_pos_offset", "q_rope_position")
TREES = ("tree_order_indptr", "tree_order")
OUTPUTS = ("o", "lse")
SCALARS = ("rotary_mode", "rope_scale", "rope_theta", "sm_scale")

DECODE = ("q", *WINDOWED_PAGES, *POSITIONS, *OUTPUTS, *SCALARS)
PREFILL = ("q", "q_indptr", *WINDOWED_PAGES, *POSITIONS, *OUTPUTS, "causal", *SCALARS)
PREFILL_RAGGED = (
    *("q", "q_indptr", "k", "v", "kv_indptr", "q_rope_position", "k_rope_pos_offset"),
    *(*OUTPUTS, "causal", *SCALARS),
)
TREE_PAGED = ("q", "q_indptr", *PAGES, *POSITIONS, *OUTPUTS, *SCALARS, *TREES)
TREE = ("q", "q_indptr", "k", "v", "kv_indptr", "q_rope_position", *TREES, *OUTPUTS, *SCALARS)
MLA_PREFILL = ("q", "q_indptr", *PAGES, *OUTPUTS, "causal", "sm_scale")
MLA_TREE = ("q", "q_indptr", *PAGES, *OUTPUTS, "sm_scale", *TREES)
_ROWS = ("row_indptr", "row_ids")
_SEGMENTS = ("first_segment", "last_segment")
PREFILL_SHARED = (
    *("q", "pages", "page_indptr", "page_values", "k_rope_pos_offset"),
    *(*_ROWS, "q_rope_position", *OUTPUTS, *_SEGMENTS, *SCALARS),
)
MLA_PREFILL_SHARED = (
    *("q", "pages", "page_indptr", "page_values"),
    *(*_ROWS, *OUTPUTS, *_SEGMENTS, "sm_scale"),
)

SCALAR_TYPES = {
    "causal": T.int32,
    "first_segment": T.int32,
    "last_segment": T.int32,
    "rotary_mode": T.int32,
    "rope_scale": T.float32,
    "rope_theta": T.float32,
    "sm_scale": T.float32,
    "window": T.int32,
}


def with_lengths(names: Sequence[str], lengths: str) -> tuple[str, ...]:
    """`names` with another form of the argument that tells the lengths of sequences."""
    return tuple(lengths if name in ("length_info", "window_info") else name for name in names)


def match(spec: KernelSpec, given: dict, align: int | None = None) -> SimpleNamespace:
    """Match the handles among the arguments of an attention kernel, by their names.

    Parameters
    ----------
    given : dict
        Arguments by name, handles and scalars.
    align : int, optional
        Bytes to which pages, q, k, v and o are aligned; None: as their elements are.

    Returns
    -------
    SimpleNamespace
        Buffers and scalars by name, and `batch_size`: of T rows of Q (without q_indptr: one a
        sequence), S rows of K and V, B sequences, N page table entries and M tree nodes

        * q ``[T, Hq, Dqk]``, dtype; q_indptr ``[B + 1]``; o ``[T, Hq, Dv]``, dtype; lse
          ``[T, Hq]``, float32;
        * pages as `layout` has them, kv_dtype; page_indptr ``[B + 1]``, page_values ``[N]``,
          length_info ``[B]``, of kernels for windows of sequences instead window_info ``[B]``,
          ``[3 * B]`` or ``[4 * B]``, or window_matrix ``[3, B]`` (see `masks.GappedSequence`);
        * k ``[S, Hk, Dqk]``, v ``[S, Hk, Dv]``, dtype; kv_indptr ``[B + 1]``;
        * k_rope_pos_offset ``[B]``, q_rope_position ``[T]``;
        * tree_order_indptr ``[B + 1]``, tree_order ``[M, 2]``;
        * with row_indptr ``[B + 1]`` and row_ids ``[R]``, the B are segments: whose rows these are.

        Index arrays are int32 and may start at any element.
    """
    if "length_info" in given or "k_rope_pos_offset" in given:
        batch_size = _size("batch_size")
        num_starts = batch_size + 1
    else:  # a size must be the whole extent of some array
        num_starts = _size("num_starts")
        batch_size = num_starts - 1
    has_own_rows = "q_indptr" in given or "row_ids" in given
    num_rows = _size("num_rows") if has_own_rows else batch_size
    num_columns, num_entries = _size("num_columns"), _size("num_entries")
    rows, columns = (num_rows, spec.num_qo_heads), (num_columns, spec.num_kv_heads)
    arrays = {
        "q": ((*rows, spec.qk_head_dim), spec.dtype),
        "k": ((*columns, spec.qk_head_dim), spec.dtype),
        "v": ((*columns, spec.v_head_dim), spec.dtype),
        "o": ((*rows, spec.v_head_dim), spec.dtype),
        "lse": (rows, F32),
    }
    indices = {
        "q_indptr": (num_starts,),
        "kv_indptr": (num_starts,),
        "page_indptr": (num_starts,),
        "page_values": (num_entries,),
        "length_info": (batch_size,),
        "window_info": (_size("num_lengths"),),
        "window_matrix": (3, batch_size),
        "k_rope_pos_offset": (batch_size,),
        "q_rope_position": (num_rows,),
        "row_indptr": (num_starts,),
        "row_ids": (_size("num_row_ids"),),
        "tree_order_indptr": (num_starts,),
        "tree_order": (_size("num_nodes"), 2),
    }
    matched = SimpleNamespace(batch_size=batch_size)
    for name, value in given.items():
        if name == "pages":
            value = page_pool(value, spec, align)
        elif name in arrays:
            value = rows_array(value, *arrays[name], None if name == "lse" else align)
        elif name in indices:
            value = index_array(value, *indices[name])
        setattr(matched, name, IRBuilder.name(name, value))
    return matched


def _size(name: str):
    """A size that a call decides; error messages tell its name."""
    return tirx.Var(name, "int32")


def index_array(handle, *shape):
    """An int32 array that may start at any element of a larger one."""
    offset = T.int32()
    return T.match_buffer(handle, shape, "int32", elem_offset=offset, offset_factor=1, align=4)


def rows_array(handle, shape, dtype: str, align: int | None = None):
    """A dense array of rows, which starts at a multiple of `align` bytes; None: at any element."""
    align = align or ITEMSIZE[dtype]
    factor = align // ITEMSIZE[dtype]
    return T.match_buffer(
        handle, shape, dtype, elem_offset=first_element(), offset_factor=factor, align=align
    )


def page_pool(handle, spec: KernelSpec, align: int | None = None):
    """The pages of a layer; they start as `rows_array` has it."""
    return rows_array(handle, pages_shape(_size("num_pages"), spec), spec.kv_dtype, align)
