# SPDX-License-Identifier: Apache-2.0
"""The arguments of decode kernels: one query row per sequence."""

from __future__ import annotations

from collections.abc import Callable

from tvm.script import tirx as T

from ..define import F32, I32, aligned, attributes
from ..layout import pages_shape
from ..spec import KernelSpec
from .inputs import Lengths, PagedInputs


def decode(
    spec: KernelSpec, attend: Callable[[PagedInputs], None], lengths: Lengths = Lengths.WINDOWS
):
    """Attention of one query row per sequence over its pages."""
    num_heads, qk_dim, v_dim = spec.num_qo_heads, spec.qk_head_dim, spec.v_head_dim
    rows, slots = aligned(spec, spec.dtype), aligned(spec, spec.kv_dtype)

    @T.prim_func(private=True)
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
        batch_size, num_pages, num_entries, num_lengths = T.int32(), T.int32(), T.int32(), T.int32()
        attend(
            PagedInputs(
                batch_size=batch_size,
                q=T.match_buffer(q, (batch_size, num_heads, qk_dim), elem_offset=T.int64(), **rows),
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
                    length_info,
                    lengths.shape(batch_size, num_lengths),
                    elem_offset=T.int32(),
                    **I32,
                ),
                k_rope_pos_offset=T.match_buffer(
                    k_rope_pos_offset, (batch_size,), elem_offset=T.int32(), **I32
                ),
                q_rope_position=T.match_buffer(
                    q_rope_position, (batch_size,), elem_offset=T.int32(), **I32
                ),
                o=T.match_buffer(o, (batch_size, num_heads, v_dim), elem_offset=T.int64(), **rows),
                lse=T.match_buffer(lse, (batch_size, num_heads), elem_offset=T.int64(), **F32),
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
    rows, slots = aligned(spec, spec.dtype), aligned(spec, spec.kv_dtype)

    @T.prim_func(private=True)
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
        batch_size, num_pages, num_entries = T.int32(), T.int32(), T.int32()
        attend(
            PagedInputs(
                batch_size=batch_size,
                q=T.match_buffer(q, (batch_size, num_heads, qk_dim), elem_offset=T.int64(), **rows),
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
                k_rope_pos_offset=T.match_buffer(
                    k_rope_pos_offset, (batch_size,), elem_offset=T.int32(), **I32
                ),
                q_rope_position=T.match_buffer(
                    q_rope_position, (batch_size,), elem_offset=T.int32(), **I32
                ),
                o=T.match_buffer(o, (batch_size, num_heads, v_dim), elem_offset=T.int64(), **rows),
                lse=T.match_buffer(lse, (batch_size, num_heads), elem_offset=T.int64(), **F32),
                rotary_mode=rotary_mode,
                rope_scale=rope_scale,
                rope_theta=rope_theta,
                sm_scale=sm_scale,
                window=window,
            )
        )

    return decode_sliding
