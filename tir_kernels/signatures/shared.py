# SPDX-License-Identifier: Apache-2.0
"""The arguments of kernels for pages that several sequences of a step share."""

from __future__ import annotations

from collections.abc import Callable

from tvm.script import tirx as T

from ..define import F32, I32, aligned, attributes
from ..layout import pages_shape
from ..spec import KernelSpec
from .inputs import SharedInputs


def prefill_shared(spec: KernelSpec, attend: Callable[[SharedInputs], None]):
    """Rows of several sequences attend to pages that they share, merged into their o and lse.

    A segment is a range of whole pages with the rows that see all of them; `batch_size` counts
    segments. In one call a row may belong to one segment at most. With longrope, whose frequencies
    are those of a sequence, rotary_mode 1 is refused.
    """
    num_heads, qk_dim, v_dim = spec.num_qo_heads, spec.qk_head_dim, spec.v_head_dim
    rows, slots = aligned(spec, spec.dtype), aligned(spec, spec.kv_dtype)

    @T.prim_func(private=True)
    def prefill_shared(
        q: T.handle,
        pages: T.handle,
        page_indptr: T.handle,
        page_values: T.handle,
        k_rope_pos_offset: T.handle,
        row_indptr: T.handle,
        row_ids: T.handle,
        q_rope_position: T.handle,
        o: T.handle,
        lse: T.handle,
        first_segment: T.int32,
        last_segment: T.int32,
        rotary_mode: T.int32,
        rope_scale: T.float32,
        rope_theta: T.float32,
        sm_scale: T.float32,
    ):
        T.func_attr(attributes(spec))
        batch_size, num_rows, num_pages, num_entries = T.int32(), T.int32(), T.int32(), T.int32()
        num_row_ids = T.int32()
        attend(
            SharedInputs(
                batch_size=batch_size,
                q=T.match_buffer(q, (num_rows, num_heads, qk_dim), elem_offset=T.int64(), **rows),
                pages=T.match_buffer(
                    pages, pages_shape(num_pages, spec), elem_offset=T.int64(), **slots
                ),
                page_indptr=T.match_buffer(
                    page_indptr, (batch_size + 1,), elem_offset=T.int32(), **I32
                ),
                page_values=T.match_buffer(
                    page_values, (num_entries,), elem_offset=T.int32(), **I32
                ),
                k_rope_pos_offset=T.match_buffer(
                    k_rope_pos_offset, (batch_size,), elem_offset=T.int32(), **I32
                ),
                row_indptr=T.match_buffer(
                    row_indptr, (batch_size + 1,), elem_offset=T.int32(), **I32
                ),
                row_ids=T.match_buffer(row_ids, (num_row_ids,), elem_offset=T.int32(), **I32),
                q_rope_position=T.match_buffer(
                    q_rope_position, (num_rows,), elem_offset=T.int32(), **I32
                ),
                o=T.match_buffer(o, (num_rows, num_heads, v_dim), elem_offset=T.int64(), **rows),
                lse=T.match_buffer(lse, (num_rows, num_heads), elem_offset=T.int64(), **F32),
                first_segment=first_segment,
                last_segment=last_segment,
                rotary_mode=rotary_mode,
                rope_scale=rope_scale,
                rope_theta=rope_theta,
                sm_scale=sm_scale,
            )
        )

    return prefill_shared


def mla_prefill_shared(spec: KernelSpec, attend: Callable[[SharedInputs], None]):
    """`prefill_shared` over the latent rows of MLA, which models rotate themselves."""
    num_heads, qk_dim, v_dim = spec.num_qo_heads, spec.qk_head_dim, spec.v_head_dim
    rows, slots = aligned(spec, spec.dtype), aligned(spec, spec.kv_dtype)

    @T.prim_func(private=True)
    def mla_prefill_shared(
        q: T.handle,
        pages: T.handle,
        page_indptr: T.handle,
        page_values: T.handle,
        row_indptr: T.handle,
        row_ids: T.handle,
        o: T.handle,
        lse: T.handle,
        first_segment: T.int32,
        last_segment: T.int32,
        sm_scale: T.float32,
    ):
        T.func_attr(attributes(spec))
        num_starts, num_rows, num_pages, num_entries = T.int32(), T.int32(), T.int32(), T.int32()
        num_row_ids = T.int32()
        attend(
            SharedInputs(
                batch_size=num_starts - 1,
                q=T.match_buffer(q, (num_rows, num_heads, qk_dim), elem_offset=T.int64(), **rows),
                pages=T.match_buffer(
                    pages, pages_shape(num_pages, spec), elem_offset=T.int64(), **slots
                ),
                page_indptr=T.match_buffer(
                    page_indptr, (num_starts,), elem_offset=T.int32(), **I32
                ),
                page_values=T.match_buffer(
                    page_values, (num_entries,), elem_offset=T.int32(), **I32
                ),
                row_indptr=T.match_buffer(row_indptr, (num_starts,), elem_offset=T.int32(), **I32),
                row_ids=T.match_buffer(row_ids, (num_row_ids,), elem_offset=T.int32(), **I32),
                o=T.match_buffer(o, (num_rows, num_heads, v_dim), elem_offset=T.int64(), **rows),
                lse=T.match_buffer(lse, (num_rows, num_heads), elem_offset=T.int64(), **F32),
                first_segment=first_segment,
                last_segment=last_segment,
                sm_scale=sm_scale,
            )
        )

    return mla_prefill_shared
