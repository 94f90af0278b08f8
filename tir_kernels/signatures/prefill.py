# SPDX-License-Identifier: Apache-2.0
"""The arguments of prefill kernels: several query rows per sequence."""

from collections.abc import Callable

from tvm.script import tirx as T

from ..define import attributes
from ..script import prim_func
from ..spec import KernelSpec
from .arrays import match_float32, match_int32, page_matcher, row_matcher, sizes
from .inputs import Lengths, PagedInputs, RaggedInputs


def prefill(
    spec: KernelSpec, attend: Callable[[PagedInputs], None], lengths: Lengths = Lengths.WINDOWS
):
    """Attention of several query rows per sequence over its pages."""
    num_heads, qk_dim, v_dim = spec.num_qo_heads, spec.qk_head_dim, spec.v_head_dim
    match_rows, match_pages = row_matcher(spec), page_matcher(spec)

    @prim_func
    def prefill(
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
        causal: T.int32,
        rotary_mode: T.int32,
        rope_scale: T.float32,
        rope_theta: T.float32,
        sm_scale: T.float32,
    ):
        T.func_attr(attributes(spec))
        batch_size, num_rows, num_pages, num_entries, num_lengths = sizes(5)
        attend(
            PagedInputs(
                batch_size=batch_size,
                q=match_rows(q, num_rows, num_heads, qk_dim),
                q_indptr=match_int32(q_indptr, batch_size + 1),
                pages=match_pages(pages, num_pages),
                page_indptr=match_int32(page_indptr, batch_size + 1),
                page_values=match_int32(page_values, num_entries),
                length_info=match_int32(length_info, *lengths.shape(batch_size, num_lengths)),
                k_rope_pos_offset=match_int32(k_rope_pos_offset, batch_size),
                q_rope_position=match_int32(q_rope_position, num_rows),
                o=match_rows(o, num_rows, num_heads, v_dim),
                lse=match_float32(lse, num_rows, num_heads),
                causal=causal,
                rotary_mode=rotary_mode,
                rope_scale=rope_scale,
                rope_theta=rope_theta,
                sm_scale=sm_scale,
                length_form=lengths,
            )
        )

    return prefill


def prefill_sliding(spec: KernelSpec, attend: Callable[[PagedInputs], None]):
    """`prefill` of layers with a window: a row sees its position and the `window` - 1 before it.

    `window` is at least 1. The rows of a sequence are the last positions of its pages, or follow
    them where `causal` is 0.
    """
    num_heads, qk_dim, v_dim = spec.num_qo_heads, spec.qk_head_dim, spec.v_head_dim
    match_rows, match_pages = row_matcher(spec), page_matcher(spec)

    @prim_func
    def prefill_sliding(
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
        causal: T.int32,
        rotary_mode: T.int32,
        rope_scale: T.float32,
        rope_theta: T.float32,
        sm_scale: T.float32,
        window: T.int32,
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
                k_rope_pos_offset=match_int32(k_rope_pos_offset, batch_size),
                q_rope_position=match_int32(q_rope_position, num_rows),
                o=match_rows(o, num_rows, num_heads, v_dim),
                lse=match_float32(lse, num_rows, num_heads),
                causal=causal,
                rotary_mode=rotary_mode,
                rope_scale=rope_scale,
                rope_theta=rope_theta,
                sm_scale=sm_scale,
                window=window,
            )
        )

    return prefill_sliding


def prefill_ragged(spec: KernelSpec, attend: Callable[[RaggedInputs], None]):
    """Attention of several query rows per sequence over ragged K and V."""
    num_heads, qk_dim, v_dim = spec.num_qo_heads, spec.qk_head_dim, spec.v_head_dim
    match_rows = row_matcher(spec)

    @prim_func
    def prefill_ragged(
        q: T.handle,
        q_indptr: T.handle,
        k: T.handle,
        v: T.handle,
        kv_indptr: T.handle,
        q_rope_position: T.handle,
        k_rope_pos_offset: T.handle,
        o: T.handle,
        lse: T.handle,
        causal: T.int32,
        rotary_mode: T.int32,
        rope_scale: T.float32,
        rope_theta: T.float32,
        sm_scale: T.float32,
    ):
        T.func_attr(attributes(spec))
        batch_size, num_rows, num_columns = sizes(3)
        attend(
            RaggedInputs(
                batch_size=batch_size,
                q=match_rows(q, num_rows, num_heads, qk_dim),
                q_indptr=match_int32(q_indptr, batch_size + 1),
                k=match_rows(k, num_columns, spec.num_kv_heads, qk_dim),
                v=match_rows(v, num_columns, spec.num_kv_heads, v_dim),
                kv_indptr=match_int32(kv_indptr, batch_size + 1),
                q_rope_position=match_int32(q_rope_position, num_rows),
                k_rope_pos_offset=match_int32(k_rope_pos_offset, batch_size),
                o=match_rows(o, num_rows, num_heads, v_dim),
                lse=match_float32(lse, num_rows, num_heads),
                causal=causal,
                rotary_mode=rotary_mode,
                rope_scale=rope_scale,
                rope_theta=rope_theta,
                sm_scale=sm_scale,
            )
        )

    return prefill_ragged


def prefill_ragged_sliding(spec: KernelSpec, attend: Callable[[RaggedInputs], None]):
    """`prefill_ragged` of layers with a window of at least 1, as in `prefill_sliding`."""
    num_heads, qk_dim, v_dim = spec.num_qo_heads, spec.qk_head_dim, spec.v_head_dim
    match_rows = row_matcher(spec)

    @prim_func
    def prefill_ragged_sliding(
        q: T.handle,
        q_indptr: T.handle,
        k: T.handle,
        v: T.handle,
        kv_indptr: T.handle,
        q_rope_position: T.handle,
        k_rope_pos_offset: T.handle,
        o: T.handle,
        lse: T.handle,
        causal: T.int32,
        rotary_mode: T.int32,
        rope_scale: T.float32,
        rope_theta: T.float32,
        sm_scale: T.float32,
        window: T.int32,
    ):
        T.func_attr(attributes(spec))
        batch_size, num_rows, num_columns = sizes(3)
        attend(
            RaggedInputs(
                batch_size=batch_size,
                q=match_rows(q, num_rows, num_heads, qk_dim),
                q_indptr=match_int32(q_indptr, batch_size + 1),
                k=match_rows(k, num_columns, spec.num_kv_heads, qk_dim),
                v=match_rows(v, num_columns, spec.num_kv_heads, v_dim),
                kv_indptr=match_int32(kv_indptr, batch_size + 1),
                q_rope_position=match_int32(q_rope_position, num_rows),
                k_rope_pos_offset=match_int32(k_rope_pos_offset, batch_size),
                o=match_rows(o, num_rows, num_heads, v_dim),
                lse=match_float32(lse, num_rows, num_heads),
                causal=causal,
                rotary_mode=rotary_mode,
                rope_scale=rope_scale,
                rope_theta=rope_theta,
                sm_scale=sm_scale,
                window=window,
            )
        )

    return prefill_ragged_sliding
