# SPDX-License-Identifier: Apache-2.0
"""Attention of layers with a window: decode and prefill with one more argument and another mask.

The page table of a sequence may begin anywhere in it, for the runtime keeps only what the window
needs: columns are counted from the first slot of the table, which is position
``k_rope_pos_offset[b]`` of the sequence. One kernel serves all windows.
"""

from __future__ import annotations

from tvm.script import tirx as T

from ..masks import WindowMask
from ..spec import KernelSpec
from .arguments import require_half_conversion
from .decode import decode_arguments, emit_decode
from .prefill import emit_paged, operands, paged_arguments


def decode_sliding(spec: KernelSpec):
    """Build the kernel `decode_sliding`: a row sees the last `window` positions of its pages.

    Its arguments are those of `decode`, then window: int32, at least 0. What it costs follows the
    window, but an even share for every thread needs a page table with little before the window.

    Parameters
    ----------
    spec : KernelSpec

    Returns
    -------
    tvm.tirx.PrimFunc

    Raises
    ------
    ValueError
        For float16 on a target that cannot convert it.
    """
    require_half_conversion(spec, spec.dtype, spec.kv_dtype)

    @T.prim_func(s_tir=True, private=True)
    def attention_decode_sliding(
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
        T.func_attr({"tirx.is_scheduled": True, "tirx.noalias": True})
        emit_decode(
            spec,
            decode_arguments(
                spec,
                q=q,
                pages=pages,
                page_indptr=page_indptr,
                page_values=page_values,
                length_info=length_info,
                k_rope_pos_offset=k_rope_pos_offset,
                q_rope_position=q_rope_position,
                o=o,
                lse=lse,
                mask=WindowMask(1, window),
                rotary_mode=rotary_mode,
                rope_scale=rope_scale,
                rope_theta=rope_theta,
                sm_scale=sm_scale,
            ),
        )

    return attention_decode_sliding


def prefill_sliding(spec: KernelSpec):
    """Build the kernel `prefill_sliding`: a row sees its position and the `window` - 1 before it.

    Its arguments are those of `prefill`, then window: int32, at least 1. The rows of a sequence are
    the last positions of its pages, or follow them where causal is 0.

    Parameters
    ----------
    spec : KernelSpec

    Returns
    -------
    tvm.tirx.PrimFunc

    Raises
    ------
    ValueError
        For float16 on a target that cannot convert it.
    """
    require_half_conversion(spec, spec.dtype, spec.kv_dtype)

    @T.prim_func(s_tir=True, private=True)
    def attention_prefill_sliding(
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
        T.func_attr({"tirx.is_scheduled": True, "tirx.noalias": True})
        emit_paged(
            spec,
            operands(spec, spec.kv_dtype),
            paged_arguments(
                spec,
                q=q,
                q_indptr=q_indptr,
                pages=pages,
                page_indptr=page_indptr,
                page_values=page_values,
                length_info=length_info,
                k_rope_pos_offset=k_rope_pos_offset,
                q_rope_position=q_rope_position,
                o=o,
                lse=lse,
                mask=WindowMask(causal, window),
                rotary_mode=rotary_mode,
                rope_scale=rope_scale,
                rope_theta=rope_theta,
                sm_scale=sm_scale,
            ),
        )

    return attention_prefill_sliding
