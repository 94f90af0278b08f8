# SPDX-License-Identifier: Apache-2.0
"""The arguments of `append_prefill`: those of `rope_append` and `prefill` in one call."""

from collections.abc import Callable

from tvm.script import tirx as T

from ..define import attributes
from ..script import prim_func
from ..spec import KernelSpec
from .arrays import match_float32, match_int32, page_matcher, row_matcher, sizes
from .inputs import FusedInputs, Lengths


def append_prefill(spec: KernelSpec, attend: Callable[[FusedInputs], None]):
    """Append K and V of fused rows, and causal attention of their Q over the pages."""
    num_heads, dim = spec.num_qo_heads, spec.qk_head_dim
    num_fused = num_heads + 2 * spec.num_kv_heads
    match_rows, match_pages = row_matcher(spec), page_matcher(spec)
    lengths = Lengths.WINDOWS

    @prim_func
    def append_prefill(
        qkv: T.handle,
        q_indptr: T.handle,
        rope_position: T.handle,
        position_map: T.handle,
        pages: T.handle,
        page_indptr: T.handle,
        page_values: T.handle,
        length_info: T.handle,
        k_rope_pos_offset: T.handle,
        q_rope_position: T.handle,
        o: T.handle,
        lse: T.handle,
        apply_rope: T.int64,
        sm_scale: T.float32,
    ):
        T.func_attr(attributes(spec))
        batch_size, num_rows, num_pages, num_entries, num_lengths = sizes(5)
        attend(
            FusedInputs(
                batch_size=batch_size,
                q=match_rows(qkv, num_rows, num_fused, dim),
                q_indptr=match_int32(q_indptr, batch_size + 1),
                rope_position=match_int32(rope_position, num_rows),
                position_map=match_int32(position_map, num_rows),
                pages=match_pages(pages, num_pages),
                page_indptr=match_int32(page_indptr, batch_size + 1),
                page_values=match_int32(page_values, num_entries),
                length_info=match_int32(length_info, *lengths.shape(batch_size, num_lengths)),
                k_rope_pos_offset=match_int32(k_rope_pos_offset, batch_size),
                q_rope_position=match_int32(q_rope_position, num_rows),
                o=match_rows(o, num_rows, num_heads, spec.v_head_dim),
                lse=match_float32(lse, num_rows, num_heads),
                apply_rope=apply_rope,
                causal=1,
                sm_scale=sm_scale,
                length_form=lengths,
            )
        )

    return append_prefill
