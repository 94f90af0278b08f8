# SPDX-License-Identifier: Apache-2.0
"""The arguments of decode kernels: one query row per sequence."""

from collections.abc import Callable

from tvm.script import tirx as T

from ..define import attributes
from ..script import prim_func
from ..spec import KernelSpec
from .arrays import match_float32, match_int32, page_matcher, row_matcher, sizes
from .inputs import Lengths, PagedInputs


def decode(
    spec: KernelSpec, attend: Callable[[PagedInputs], None], lengths: Lengths = Lengths.WINDOWS
):
    """Attention of one query row per sequence over its pages."""
    num_heads, qk_dim, v_dim = spec.num_qo_heads, spec.qk_head_dim, spec.v_head_dim
    match_rows, match_pages = row_matcher(spec), page_matcher(spec)

    @prim_func
    def decode(
        q: T.handle,
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
    ):
        T.func_attr(attributes(spec))
        batch_size, num_pages, num_entries, num_lengths = sizes(4)
        attend(
            PagedInputs(
                batch_size=batch_size,
                q=match_rows(q, batch_size, num_heads, qk_dim),
                pages=match_pages(pages, num_pages),
                page_indptr=match_int32(page_indptr, batch_size + 1),
                page_values=match_int32(page_values, num_entries),
                length_info=match_int32(length_info, *lengths.shape(batch_size, num_lengths)),
                k_rope_pos_offset=match_int32(k_rope_pos_offset, batch_size),
                q_rope_position=match_int32(q_rope_position, batch_size),
                o=match_rows(o, batch_size, num_heads, v_dim),
                lse=match_float32(lse, batch_size, num_heads),
                rotary_mode=rotary_mode,
                rope_scale=rope_scale,
                rope_theta=rope_theta,
                sm_scale=sm_scale,
                length_form=lengths,
            )
        )

    return decode


def decode_sliding(spec: KernelSpec, attend: Callable[[PagedInputs], None]):
    """`decode` of layers with a window: a row sees the last `window` positions of its pages.

    `window` is at least 0. The cost scales with the window, but work is balanced among threads only
    if the page table has few pages before the window.
    """
    num_heads, qk_dim, v_dim = spec.num_qo_heads, spec.qk_head_dim, spec.v_head_dim
    match_rows, match_pages = row_matcher(spec), page_matcher(spec)

    @prim_func
    def decode_sliding(
        q: T.handle,
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
        window: T.int32,
    ):
        T.func_attr(attributes(spec))
        batch_size, num_pages, num_entries = sizes(3)
        attend(
            PagedInputs(
                batch_size=batch_size,
                q=match_rows(q, batch_size, num_heads, qk_dim),
                pages=match_pages(pages, num_pages),
                page_indptr=match_int32(page_indptr, batch_size + 1),
                page_values=match_int32(page_values, num_entries),
                length_info=match_int32(length_info, batch_size),
                k_rope_pos_offset=match_int32(k_rope_pos_offset, batch_size),
                q_rope_position=match_int32(q_rope_position, batch_size),
                o=match_rows(o, batch_size, num_heads, v_dim),
                lse=match_float32(lse, batch_size, num_heads),
                rotary_mode=rotary_mode,
                rope_scale=rope_scale,
                rope_theta=rope_theta,
                sm_scale=sm_scale,
                window=window,
            )
        )

    return decode_sliding
