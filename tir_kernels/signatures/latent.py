# SPDX-License-Identifier: Apache-2.0
"""The arguments of absorbed MLA attention: a slot holds one latent row, which is K and V."""

from collections.abc import Callable

from tvm.script import tirx as T

from ..define import attributes
from ..script import prim_func
from ..spec import KernelSpec
from .arrays import match_float32, match_int32, page_matcher, row_matcher, sizes
from .inputs import PagedInputs


def mla_prefill(spec: KernelSpec, attend: Callable[[PagedInputs], None]):
    """Absorbed attention of any number of rows per sequence over its pages."""
    num_heads, qk_dim, v_dim = spec.num_qo_heads, spec.qk_head_dim, spec.v_head_dim
    match_rows, match_pages = row_matcher(spec), page_matcher(spec)

    @prim_func
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
        batch_size, num_rows, num_pages, num_entries = sizes(4)
        attend(
            PagedInputs(
                batch_size=batch_size,
                q=match_rows(q, num_rows, num_heads, qk_dim),
                q_indptr=match_int32(q_indptr, batch_size + 1),
                pages=match_pages(pages, num_pages),
                page_indptr=match_int32(page_indptr, batch_size + 1),
                page_values=match_int32(page_values, num_entries),
                length_info=match_int32(length_info, batch_size),
                o=match_rows(o, num_rows, num_heads, v_dim),
                lse=match_float32(lse, num_rows, num_heads),
                causal=causal,
                sm_scale=sm_scale,
            )
        )

    return mla_prefill


def mla_tree(spec: KernelSpec, attend: Callable[[PagedInputs], None]):
    """Absorbed attention of new tree nodes; rows see what they see in `tree.tree_paged`."""
    num_heads, qk_dim, v_dim = spec.num_qo_heads, spec.qk_head_dim, spec.v_head_dim
    match_rows, match_pages = row_matcher(spec), page_matcher(spec)

    @prim_func
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
        batch_size, num_rows, num_pages, num_entries, num_nodes = sizes(5)
        attend(
            PagedInputs(
                batch_size=batch_size,
                q=match_rows(q, num_rows, num_heads, qk_dim),
                q_indptr=match_int32(q_indptr, batch_size + 1),
                pages=match_pages(pages, num_pages),
                page_indptr=match_int32(page_indptr, batch_size + 1),
                page_values=match_int32(page_values, num_entries),
                length_info=match_int32(length_info, batch_size),
                o=match_rows(o, num_rows, num_heads, v_dim),
                lse=match_float32(lse, num_rows, num_heads),
                sm_scale=sm_scale,
                tree_order_indptr=match_int32(tree_order_indptr, batch_size + 1),
                tree_order=match_int32(tree_order, num_nodes, 2),
            )
        )

    return mla_tree
