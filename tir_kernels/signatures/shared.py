# SPDX-License-Identifier: Apache-2.0
"""The arguments of kernels for pages that several sequences of a step share."""

from collections.abc import Callable

from tvm.script import tirx as T

from ..define import attributes
from ..script import prim_func
from ..spec import KernelSpec
from .arrays import match_float32, match_int32, page_matcher, row_matcher, sizes
from .inputs import SharedInputs


def prefill_shared(spec: KernelSpec, attend: Callable[[SharedInputs], None]):
    """Rows of several sequences attend to pages that they share, merged into their o and lse.

    A segment is a range of whole pages with the rows that see all of them; `batch_size` counts
    segments. In one call a row may belong to one segment at most. With longrope, whose frequencies
    are those of a sequence, rotary_mode 1 is refused.
    """
    num_heads, qk_dim, v_dim = spec.num_qo_heads, spec.qk_head_dim, spec.v_head_dim
    match_rows, match_pages = row_matcher(spec), page_matcher(spec)

    @prim_func
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
        batch_size, num_rows, num_pages, num_entries, num_row_ids = sizes(5)
        attend(
            SharedInputs(
                batch_size=batch_size,
                q=match_rows(q, num_rows, num_heads, qk_dim),
                pages=match_pages(pages, num_pages),
                page_indptr=match_int32(page_indptr, batch_size + 1),
                page_values=match_int32(page_values, num_entries),
                k_rope_pos_offset=match_int32(k_rope_pos_offset, batch_size),
                row_indptr=match_int32(row_indptr, batch_size + 1),
                row_ids=match_int32(row_ids, num_row_ids),
                q_rope_position=match_int32(q_rope_position, num_rows),
                o=match_rows(o, num_rows, num_heads, v_dim),
                lse=match_float32(lse, num_rows, num_heads),
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
    match_rows, match_pages = row_matcher(spec), page_matcher(spec)

    @prim_func
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
        num_starts, num_rows, num_pages, num_entries, num_row_ids = sizes(5)
        attend(
            SharedInputs(
                batch_size=num_starts - 1,
                q=match_rows(q, num_rows, num_heads, qk_dim),
                pages=match_pages(pages, num_pages),
                page_indptr=match_int32(page_indptr, num_starts),
                page_values=match_int32(page_values, num_entries),
                row_indptr=match_int32(row_indptr, num_starts),
                row_ids=match_int32(row_ids, num_row_ids),
                o=match_rows(o, num_rows, num_heads, v_dim),
                lse=match_float32(lse, num_rows, num_heads),
                first_segment=first_segment,
                last_segment=last_segment,
                sm_scale=sm_scale,
            )
        )

    return mla_prefill_shared
