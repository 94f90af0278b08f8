# SPDX-License-Identifier: Apache-2.0
"""The arguments of prefill kernels: several query rows per sequence."""

from __future__ import annotations

from collections.abc import Callable

from tvm.script import tirx as T

from ..define import F32, I32, aligned, attributes
from ..layout import pages_shape
from ..spec import KernelSpec
from .inputs import Lengths, PagedInputs, RaggedInputs


def prefill(
    spec: KernelSpec, attend: Callable[[PagedInputs], None], lengths: Lengths = Lengths.WINDOWS
):
    """Attention of several query rows per sequence over its pages."""
    num_heads, qk_dim, v_dim = spec.num_qo_heads, spec.qk_head_dim, spec.v_head_dim
    rows, slots = aligned(spec, spec.dtype), aligned(spec, spec.kv_dtype)

    @T.prim_func(private=True)
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
        batch_size, num_rows, num_pages, num_entries = T.int32(), T.int32(), T.int32(), T.int32()
        num_lengths = T.int32()
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
                    length_info,
                    lengths.shape(batch_size, num_lengths),
                    elem_offset=T.int32(),
                    **I32,
                ),
                k_rope_pos_offset=T.match_buffer(
                    k_rope_pos_offset, (batch_size,), elem_offset=T.int32(), **I32
                ),
                q_rope_position=T.match_buffer(
                    q_rope_position, (num_rows,), elem_offset=T.int32(), **I32
                ),
                o=T.match_buffer(o, (num_rows, num_heads, v_dim), elem_offset=T.int64(), **rows),
                lse=T.match_buffer(lse, (num_rows, num_heads), elem_offset=T.int64(), **F32),
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
    rows, slots = aligned(spec, spec.dtype), aligned(spec, spec.kv_dtype)

    @T.prim_func(private=True)
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
                k_rope_pos_offset=T.match_buffer(
                    k_rope_pos_offset, (batch_size,), elem_offset=T.int32(), **I32
                ),
                q_rope_position=T.match_buffer(
                    q_rope_position, (num_rows,), elem_offset=T.int32(), **I32
                ),
                o=T.match_buffer(o, (num_rows, num_heads, v_dim), elem_offset=T.int64(), **rows),
                lse=T.match_buffer(lse, (num_rows, num_heads), elem_offset=T.int64(), **F32),
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
    rows = aligned(spec, spec.dtype)

    @T.prim_func(private=True)
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
        batch_size, num_rows, num_columns = T.int32(), T.int32(), T.int32()
        attend(
            RaggedInputs(
                batch_size=batch_size,
                q=T.match_buffer(q, (num_rows, num_heads, qk_dim), elem_offset=T.int64(), **rows),
                q_indptr=T.match_buffer(q_indptr, (batch_size + 1,), elem_offset=T.int32(), **I32),
                k=T.match_buffer(
                    k, (num_columns, spec.num_kv_heads, qk_dim), elem_offset=T.int64(), **rows
                ),
                v=T.match_buffer(
                    v, (num_columns, spec.num_kv_heads, v_dim), elem_offset=T.int64(), **rows
                ),
                kv_indptr=T.match_buffer(
                    kv_indptr, (batch_size + 1,), elem_offset=T.int32(), **I32
                ),
                q_rope_position=T.match_buffer(
                    q_rope_position, (num_rows,), elem_offset=T.int32(), **I32
                ),
                k_rope_pos_offset=T.match_buffer(
                    k_rope_pos_offset, (batch_size,), elem_offset=T.int32(), **I32
                ),
                o=T.match_buffer(o, (num_rows, num_heads, v_dim), elem_offset=T.int64(), **rows),
                lse=T.match_buffer(lse, (num_rows, num_heads), elem_offset=T.int64(), **F32),
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
    rows = aligned(spec, spec.dtype)

    @T.prim_func(private=True)
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
        batch_size, num_rows, num_columns = T.int32(), T.int32(), T.int32()
        attend(
            RaggedInputs(
                batch_size=batch_size,
                q=T.match_buffer(q, (num_rows, num_heads, qk_dim), elem_offset=T.int64(), **rows),
                q_indptr=T.match_buffer(q_indptr, (batch_size + 1,), elem_offset=T.int32(), **I32),
                k=T.match_buffer(
                    k, (num_columns, spec.num_kv_heads, qk_dim), elem_offset=T.int64(), **rows
                ),
                v=T.match_buffer(
                    v, (num_columns, spec.num_kv_heads, v_dim), elem_offset=T.int64(), **rows
                ),
                kv_indptr=T.match_buffer(
                    kv_indptr, (batch_size + 1,), elem_offset=T.int32(), **I32
                ),
                q_rope_position=T.match_buffer(
                    q_rope_position, (num_rows,), elem_offset=T.int32(), **I32
                ),
                k_rope_pos_offset=T.match_buffer(
                    k_rope_pos_offset, (batch_size,), elem_offset=T.int32(), **I32
                ),
                o=T.match_buffer(o, (num_rows, num_heads, v_dim), elem_offset=T.int64(), **rows),
                lse=T.match_buffer(lse, (num_rows, num_heads), elem_offset=T.int64(), **F32),
                causal=causal,
                rotary_mode=rotary_mode,
                rope_scale=rope_scale,
                rope_theta=rope_theta,
                sm_scale=sm_scale,
                window=window,
            )
        )

    return prefill_ragged_sliding
