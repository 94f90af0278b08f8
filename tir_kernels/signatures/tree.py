# SPDX-License-Identifier: Apache-2.0
"""The arguments of kernels over token trees."""

from collections.abc import Callable

from tvm.script import tirx as T

from ..define import attributes
from ..script import prim_func
from ..spec import KernelSpec
from .arrays import match_float32, match_int32, page_matcher, row_matcher, sizes
from .inputs import PagedInputs, RaggedInputs


def tree_paged(spec: KernelSpec, attend: Callable[[PagedInputs], None]):
    """Attention of new tree nodes over pages that hold this step's K and V already.

    The rows of a sequence are the last nodes of its uncommitted tree, and the tree's n nodes, of
    this and earlier steps, are its last n columns. A row sees all columns before the tree, its
    ancestors and itself. A sequence with n = 0 is plain causal, as is one whose nodes form a chain.
    Nodes follow their parents; trees may have any size. A call in which a sequence has fewer nodes
    than rows, but some, is refused on CPUs; on GPUs its results are meaningless.

    For rotary_mode 1, K of a node is rotated by its depth (which follows from the order) after the
    columns before the tree; q_rope_position should say the same of the rows.
    """
    num_heads, qk_dim, v_dim = spec.num_qo_heads, spec.qk_head_dim, spec.v_head_dim
    match_rows, match_pages = row_matcher(spec), page_matcher(spec)

    @prim_func
    def tree_paged(
        q: T.handle,
        q_indptr: T.handle,
        pages: T.handle,
        page_indptr: T.handle,
        page_values: T.handle,
        length_info: T.handle,
        k_rope_pos_offset: T.handle,
        q_rope_position: T.handle,
        o: T.handle,
        lse: T.handle,
        rotary_mode: T.int32,
        rope_scale: T.float32,
        rope_theta: T.float32,
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
                k_rope_pos_offset=match_int32(k_rope_pos_offset, batch_size),
                q_rope_position=match_int32(q_rope_position, num_rows),
                o=match_rows(o, num_rows, num_heads, v_dim),
                lse=match_float32(lse, num_rows, num_heads),
                rotary_mode=rotary_mode,
                rope_scale=rope_scale,
                rope_theta=rope_theta,
                sm_scale=sm_scale,
                tree_order_indptr=match_int32(tree_order_indptr, batch_size + 1),
                tree_order=match_int32(tree_order, num_nodes, 2),
            )
        )

    return tree_paged


def tree_paged_sliding(spec: KernelSpec, attend: Callable[[PagedInputs], None]):
    """`tree_paged` of layers with a window.

    `window` is at least 1. A row sees of these columns those whose position is less than `window`
    before its own, itself included. Positions are those of RoPE, whatever the rotary_mode:
    q_rope_position of the rows; k_rope_pos_offset plus the column before the tree; and of a node
    its depth more than there are columns before the tree.
    """
    num_heads, qk_dim, v_dim = spec.num_qo_heads, spec.qk_head_dim, spec.v_head_dim
    match_rows, match_pages = row_matcher(spec), page_matcher(spec)

    @prim_func
    def tree_paged_sliding(
        q: T.handle,
        q_indptr: T.handle,
        pages: T.handle,
        page_indptr: T.handle,
        page_values: T.handle,
        length_info: T.handle,
        k_rope_pos_offset: T.handle,
        q_rope_position: T.handle,
        o: T.handle,
        lse: T.handle,
        rotary_mode: T.int32,
        rope_scale: T.float32,
        rope_theta: T.float32,
        sm_scale: T.float32,
        tree_order_indptr: T.handle,
        tree_order: T.handle,
        window: T.int32,
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
                k_rope_pos_offset=match_int32(k_rope_pos_offset, batch_size),
                q_rope_position=match_int32(q_rope_position, num_rows),
                o=match_rows(o, num_rows, num_heads, v_dim),
                lse=match_float32(lse, num_rows, num_heads),
                rotary_mode=rotary_mode,
                rope_scale=rope_scale,
                rope_theta=rope_theta,
                sm_scale=sm_scale,
                tree_order_indptr=match_int32(tree_order_indptr, batch_size + 1),
                tree_order=match_int32(tree_order, num_nodes, 2),
                window=window,
            )
        )

    return tree_paged_sliding


def tree(spec: KernelSpec, attend: Callable[[RaggedInputs], None]):
    """Attention among tree nodes whose K and V are ragged arrays.

    As `tree_paged`, with all columns of a sequence in k and v; usually these are the step's own
    rows. They may be fewer than the tree has nodes: then they are the last ones, and a row sees its
    ancestors among them. K of a column is rotated by the position that q_rope_position gives the
    first row, plus the difference of their depths.
    """
    num_heads, qk_dim, v_dim = spec.num_qo_heads, spec.qk_head_dim, spec.v_head_dim
    match_rows = row_matcher(spec)

    @prim_func
    def tree(
        q: T.handle,
        q_indptr: T.handle,
        k: T.handle,
        v: T.handle,
        kv_indptr: T.handle,
        q_rope_position: T.handle,
        tree_order_indptr: T.handle,
        tree_order: T.handle,
        o: T.handle,
        lse: T.handle,
        rotary_mode: T.int32,
        rope_scale: T.float32,
        rope_theta: T.float32,
        sm_scale: T.float32,
    ):
        T.func_attr(attributes(spec))
        num_starts, num_rows, num_columns, num_nodes = sizes(4)
        attend(
            RaggedInputs(
                batch_size=num_starts - 1,
                q=match_rows(q, num_rows, num_heads, qk_dim),
                q_indptr=match_int32(q_indptr, num_starts),
                k=match_rows(k, num_columns, spec.num_kv_heads, qk_dim),
                v=match_rows(v, num_columns, spec.num_kv_heads, v_dim),
                kv_indptr=match_int32(kv_indptr, num_starts),
                q_rope_position=match_int32(q_rope_position, num_rows),
                tree_order_indptr=match_int32(tree_order_indptr, num_starts),
                tree_order=match_int32(tree_order, num_nodes, 2),
                o=match_rows(o, num_rows, num_heads, v_dim),
                lse=match_float32(lse, num_rows, num_heads),
                rotary_mode=rotary_mode,
                rope_scale=rope_scale,
                rope_theta=rope_theta,
                sm_scale=sm_scale,
            )
        )

    return tree


def tree_sliding(spec: KernelSpec, attend: Callable[[RaggedInputs], None]):
    """`tree` of layers with a window of at least 1, as in `tree_paged_sliding`."""
    num_heads, qk_dim, v_dim = spec.num_qo_heads, spec.qk_head_dim, spec.v_head_dim
    match_rows = row_matcher(spec)

    @prim_func
    def tree_sliding(
        q: T.handle,
        q_indptr: T.handle,
        k: T.handle,
        v: T.handle,
        kv_indptr: T.handle,
        q_rope_position: T.handle,
        tree_order_indptr: T.handle,
        tree_order: T.handle,
        o: T.handle,
        lse: T.handle,
        rotary_mode: T.int32,
        rope_scale: T.float32,
        rope_theta: T.float32,
        sm_scale: T.float32,
        window: T.int32,
    ):
        T.func_attr(attributes(spec))
        num_starts, num_rows, num_columns, num_nodes = sizes(4)
        attend(
            RaggedInputs(
                batch_size=num_starts - 1,
                q=match_rows(q, num_rows, num_heads, qk_dim),
                q_indptr=match_int32(q_indptr, num_starts),
                k=match_rows(k, num_columns, spec.num_kv_heads, qk_dim),
                v=match_rows(v, num_columns, spec.num_kv_heads, v_dim),
                kv_indptr=match_int32(kv_indptr, num_starts),
                q_rope_position=match_int32(q_rope_position, num_rows),
                tree_order_indptr=match_int32(tree_order_indptr, num_starts),
                tree_order=match_int32(tree_order, num_nodes, 2),
                o=match_rows(o, num_rows, num_heads, v_dim),
                lse=match_float32(lse, num_rows, num_heads),
                rotary_mode=rotary_mode,
                rope_scale=rope_scale,
                rope_theta=rope_theta,
                sm_scale=sm_scale,
                window=window,
            )
        )

    return tree_sliding
