# SPDX-License-Identifier: Apache-2.0
"""The arguments of absorbed MLA attention: a slot holds one latent row, which is K and V."""

from __future__ import annotations

from collections.abc import Callable

from tvm.script import tirx as T

from ..define import F32, I32, aligned, attributes
from ..layout import pages_shape
from ..spec import KernelSpec
from .inputs import PagedInputs


def mla_prefill(spec: KernelSpec, attend: Callable[[PagedInputs], None]):
    """Absorbed attention of any number of rows per sequence over its pages."""
    num_heads, qk_dim, v_dim = spec.num_qo_heads, spec.qk_head_dim, spec.v_head_dim
    rows, slots = aligned(spec, spec.dtype), aligned(spec, spec.kv_dtype)

    @T.prim_func(private=True)
    def mla_prefill(
        q: T.handle,
        q_indptr: T.handle,
        pages: T.handle,
        page_indptr: T.handle,
        page_values: T.handle,
        length_info: T.handle,
        o: T.handle,
        lse: T.handle,
        causal: T.int32,
        sm_scale: T.float32,
    ):
        T.func_attr(attributes(spec))
        batch_size, num_rows, num_pages, num_entries = T.int32(), T.int32(), T.int32(), T.int32()
        attend(
            PagedInputs(
                batch_size=batch_size,
                q=T.match_buffer(q, (num_rows, num_heads, qk_dim), elem_offset=T.int64(), **rows),
                q_indptr=T.match_buffer(q_indptr, (batch_size + 1,), elem_offset=T.int32(), **I32),
                pages=T.match_buffer(
                    pages, pages_shape(num_pages, spec), elem_offset=T.int64(), **slots
                ),
                page_indptr=T.match_buffer(
                    page_indptr, (batch_size + 1,), elem_offset=T.int32(), **I32
                ),
                page_values=T.match_buffer(
                    page_values, (num_entries,), elem_offset=T.int32(), **I32
                ),
                length_info=T.match_buffer(
                    length_info, (batch_size,), elem_offset=T.int32(), **I32
                ),
                o=T.match_buffer(o, (num_rows, num_heads, v_dim), elem_offset=T.int64(), **rows),
                lse=T.match_buffer(lse, (num_rows, num_heads), elem_offset=T.int64(), **F32),
                causal=causal,
                sm_scale=sm_scale,
            )
        )

    return mla_prefill


def mla_tree(spec: KernelSpec, attend: Callable[[PagedInputs], None]):
    """Absorbed attention of new tree nodes; rows see what they see in `tree.tree_paged`."""
    num_heads, qk_dim, v_dim = spec.num_qo_heads, spec.qk_head_dim, spec.v_head_dim
    rows, slots = aligned(spec, spec.dtype), aligned(spec, spec.kv_dtype)

    @T.prim_func(private=True)
    def mla_tree(
        q: T.handle,
        q_indptr: T.handle,
        pages: T.handle,
        page_indptr: T.handle,
        page_values: T.handle,
        length_info: T.handle,
        o: T.handle,
        lse: T.handle,
        sm_scale: T.float32,
        tree_order_indptr: T.handle,
        tree_order: T.handle,
    ):
        T.func_attr(attributes(spec))
        batch_size, num_rows, num_pages, num_entries = T.int32(), T.int32(), T.int32(), T.int32()
        num_nodes = T.int32()
        attend(
            PagedInputs(
                batch_size=batch_size,
                q=T.match_buffer(q, (num_rows, num_heads, qk_dim), elem_offset=T.int64(), **rows),
                q_indptr=T.match_buffer(q_indptr, (batch_size + 1,), elem_offset=T.int32(), **I32),
                pages=T.match_buffer(
                    pages, pages_shape(num_pages, spec), elem_offset=T.int64(), **slots
                ),
                page_indptr=T.match_buffer(
                    page_indptr, (batch_size + 1,), elem_offset=T.int32(), **I32
                ),
                page_values=T.match_buffer(
                    page_values, (num_entries,), elem_offset=T.int32(), **I32
                ),
                length_info=T.match_buffer(
                    length_info, (batch_size,), elem_offset=T.int32(), **I32
                ),
                o=T.match_buffer(o, (num_rows, num_heads, v_dim), elem_offset=T.int64(), **rows),
                lse=T.match_buffer(lse, (num_rows, num_heads), elem_offset=T.int64(), **F32),
                sm_scale=sm_scale,
                tree_order_indptr=T.match_buffer(
                    tree_order_indptr, (batch_size + 1,), elem_offset=T.int32(), **I32
                ),
                tree_order=T.match_buffer(tree_order, (num_nodes, 2), elem_offset=T.int32(), **I32),
            )
        )

    return mla_tree
