# SPDX-License-Identifier: Apache-2.0
"""A step's Q, K and V: split, rotated, and written to the pages.

`rope_append` does it in one pass. `split_rotary` and `transpose_append` are its two halves, for the
runtime inside apache-tvm.
"""

from tvm.script import tirx as T

from ..define import attributes
from ..layout import (
    K_PLANE,
    V_PLANE,
    TwoWidths,
    match_pages,
    row_bytes,
    rows_of,
    slot_offset,
    slot_page,
    view_pages,
)
from ..script import prim_func
from ..signatures.arrays import match_float32, match_int32, row_matcher
from ..spec import ITEMSIZE, KernelSpec
from ..targets import components_of


def transpose_append(spec: KernelSpec):
    """Build the kernel that writes K and V rows to their slots.

    Arguments: pages, k ``[T, Hk, Dqk]``, v ``[T, Hk, Dv]``, slots int32 ``[T]`` (a
    negative one: do not write); static scales: also float32 ``[2, Hk]``, those of K and of V.
    """
    num_heads, page_size = spec.num_kv_heads, spec.page_size
    c, match_rows = components_of(spec), row_matcher(spec)

    @prim_func(absent=spec.without_scales)
    def transpose_append(
        var_pages: T.handle,
        var_k: T.handle,
        var_v: T.handle,
        var_slots: T.handle,
        var_kv_scales: T.handle,
    ):
        T.func_attr(attributes(spec))
        num_pages, n = T.int32(), T.int64()
        pages = match_pages(var_pages, num_pages, spec)
        k = match_rows(var_k, n, num_heads, spec.qk_head_dim)
        v = match_rows(var_v, n, num_heads, spec.v_head_dim)
        slots = match_int32(var_slots, n)
        if spec.static_scales:
            scales = match_float32(var_kv_scales, 2, num_heads)
        else:
            scales = T.meta_var(None)
        stored = T.meta_var(view_pages(pages, spec))
        worker = c.Worker(spec)
        k_rows = c.RowCopy(worker, k, rows_of(stored, K_PLANE), scales)
        v_rows = c.RowCopy(worker, v, rows_of(stored, V_PLANE), scales)
        for row in worker.items(n, 2 * num_heads * _copied_bytes(spec)):
            slot = slots[row]
            if slot >= 0:
                page, offset = slot_page(slot, page_size), slot_offset(slot, page_size)
                for h in k_rows.rows(num_heads):
                    k_rows.copy((row, h), (page, K_PLANE, h, offset))
                for h in v_rows.rows(num_heads):
                    v_rows.copy((row, h), (page, V_PLANE, h, offset))

    return transpose_append


def transpose_append_mla(spec: KernelSpec):
    """Build the kernel that writes latent rows to their slots.

    Arguments: pages ``[P, page, D]``, kv ``[T, D]``, slots int32 ``[T]`` (a negative
    one: do not write).
    """
    width, page_size = spec.qk_head_dim, spec.page_size
    c, match_rows = components_of(spec), row_matcher(spec)

    @prim_func
    def transpose_append_mla(var_pages: T.handle, var_kv: T.handle, var_slots: T.handle):
        T.func_attr(attributes(spec))
        num_pages, n = T.int32(), T.int64()
        pages = match_pages(var_pages, num_pages, spec)
        kv = match_rows(var_kv, n, width)
        slots = match_int32(var_slots, n)
        stored = T.meta_var(view_pages(pages, spec))
        worker = c.Worker(spec)
        rows = c.RowCopy(worker, kv, stored)
        for row in worker.items(n, _copied_bytes(spec)):
            slot = slots[row]
            if slot >= 0:
                page, offset = slot_page(slot, page_size), slot_offset(slot, page_size)
                for _ in rows.rows(1):
                    rows.copy((row,), (page, offset))

    return transpose_append_mla


def split_rotary(spec: KernelSpec):
    """Build the kernel that splits fused rows and rotates Q and K.

    Arguments: qkv, see `match_fused`, positions int32 ``[T]``, q ``[T, Hq, Dqk]``,
    k ``[T, Hk, Dqk]``, v ``[T, Hk, Dv]``, apply_rope int64. longrope: in place of the last one,
    float32 ``[rotary_dim]``, the long factors, then the short ones. Without a table of sequences
    their lengths are not known: the largest position of the call chooses the factors of all rows.
    """
    num_qo_heads, num_kv_heads, head_dim = spec.num_qo_heads, spec.num_kv_heads, spec.qk_head_dim
    first_v, num_heads = num_qo_heads + num_kv_heads, num_qo_heads + 2 * num_kv_heads
    is_longrope = spec.rope.kind == "longrope"
    c, match_rows = components_of(spec), row_matcher(spec)

    @prim_func(absent=("apply_rope",) if is_longrope else ("var_ext_factors",))
    def split_rotary(
        var_qkv: T.handle,
        var_positions: T.handle,
        var_q: T.handle,
        var_k: T.handle,
        var_v: T.handle,
        apply_rope: T.int64,
        var_ext_factors: T.handle,
    ):
        T.func_attr(attributes(spec))
        n = T.int64()
        qkv = match_fused(var_qkv, n, spec)
        positions = match_int32(var_positions, n)
        q = match_rows(var_q, n, num_qo_heads, head_dim)
        k = match_rows(var_k, n, num_kv_heads, head_dim)
        v = match_rows(var_v, n, num_kv_heads, spec.v_head_dim)
        if is_longrope:
            ext_factors = match_float32(var_ext_factors, spec.rope.rotary_dim)
        else:
            ext_factors = T.meta_var(None)
        qk_heads, v_heads = T.meta_var(heads_of(qkv, spec))
        worker = c.Worker(spec, (qk_heads, q, k))
        q_rows, k_rows = c.RowRotation(worker, qk_heads, q), c.RowRotation(worker, qk_heads, k)
        v_rows = c.RowCopy(worker, v_heads, v)
        if is_longrope:
            last_position = T.meta_var(worker.largest(positions, n))
            is_rotated = T.meta_var(True)
        else:
            last_position = T.meta_var(None)
            is_rotated = T.meta_var(apply_rope > 0)
        for row in worker.items(n, num_heads * _copied_bytes(spec)):
            cos_sin = c.CosSin(worker, ext_factors)
            if is_rotated:
                cos_sin.fill(positions[row], last_position)
            for h in q_rows.rows(num_qo_heads):
                q_rows.write(cos_sin, is_rotated, (row, h), (row, h))
            for h in k_rows.rows(num_kv_heads):
                k_rows.write(cos_sin, is_rotated, (row, num_qo_heads + h), (row, h))
            for h in v_rows.rows(num_kv_heads):
                v_rows.copy((row, first_v + h), (row, h))

    return split_rotary


def rope_append(spec: KernelSpec):
    """Build the kernel that splits fused rows, rotates, and writes K and V to the pages.

    Arguments: qkv, see `match_fused`, query_indptr int32 ``[B + 1]``, query_positions int32
    ``[T]``, slots int32 ``[T]`` (a negative one: do not write K and V), q ``[T, Hq, Dqk]``, pages,
    apply_rope int64; longrope: also float32 ``[rotary_dim]``, the long factors, then the
    short ones; static scales: also float32 ``[2, Hk]``.
    """
    num_qo_heads, num_kv_heads, head_dim = spec.num_qo_heads, spec.num_kv_heads, spec.qk_head_dim
    first_v, num_heads = num_qo_heads + num_kv_heads, num_qo_heads + 2 * num_kv_heads
    is_longrope, page_size = spec.rope.kind == "longrope", spec.page_size
    c, match_rows = components_of(spec), row_matcher(spec)

    @prim_func(absent=spec.without_scales | (set() if is_longrope else {"var_ext_factors"}))
    def rope_append(
        var_qkv: T.handle,
        var_query_indptr: T.handle,
        var_query_positions: T.handle,
        var_slots: T.handle,
        var_q: T.handle,
        var_pages: T.handle,
        apply_rope: T.int64,
        var_ext_factors: T.handle,
        var_kv_scales: T.handle,
    ):
        T.func_attr(attributes(spec))
        num_pages, num_starts, n = T.int32(), T.int64(), T.int64()
        qkv = match_fused(var_qkv, n, spec)
        query_indptr = match_int32(var_query_indptr, num_starts)
        query_positions = match_int32(var_query_positions, n)
        slots = match_int32(var_slots, n)
        q = match_rows(var_q, n, num_qo_heads, head_dim)
        pages = match_pages(var_pages, num_pages, spec)
        if is_longrope:
            ext_factors = match_float32(var_ext_factors, spec.rope.rotary_dim)
        else:
            ext_factors = T.meta_var(None)
        if spec.static_scales:
            scales = match_float32(var_kv_scales, 2, num_kv_heads)
        else:
            scales = T.meta_var(None)
        is_rotated = T.meta_var(apply_rope > 0)
        stored = T.meta_var(view_pages(pages, spec))
        qk_heads, v_heads = T.meta_var(heads_of(qkv, spec))
        worker = c.Worker(spec, (qk_heads, q, rows_of(stored, K_PLANE)))
        q_rows = c.RowRotation(worker, qk_heads, q)
        k_rows = c.RowRotation(worker, qk_heads, rows_of(stored, K_PLANE), scales)
        v_rows = c.RowCopy(worker, v_heads, rows_of(stored, V_PLANE), scales)
        for row in worker.items(n, num_heads * _copied_bytes(spec)):
            cos_sin = c.CosSin(worker, ext_factors)
            last_position = -1
            if is_longrope:
                low, high = 0, T.cast(num_starts, "int32") - 1
                while high - low > 1:  # the sequence whose rows begin at or before this one
                    middle = (low + high) // 2
                    if T.cast(query_indptr[middle], "int64") <= row:
                        low = middle
                    else:
                        high = middle
                last_position = query_positions[query_indptr[low + 1] - 1]
            if is_rotated:
                cos_sin.fill(query_positions[row], last_position)
            for h in q_rows.rows(num_qo_heads):
                q_rows.write(cos_sin, is_rotated, (row, h), (row, h))
            slot = slots[row]
            if slot >= 0:
                page, offset = slot_page(slot, page_size), slot_offset(slot, page_size)
                for h in k_rows.rows(num_kv_heads):
                    k_rows.write(
                        cos_sin, is_rotated, (row, num_qo_heads + h), (page, K_PLANE, h, offset)
                    )
                for h in v_rows.rows(num_kv_heads):
                    v_rows.copy((row, first_v + h), (page, V_PLANE, h, offset))

    return rope_append


def match_fused(handle, num_rows, spec: KernelSpec):
    """Match fused rows: ``[T, Hq + 2 * Hk, D]``.

    With two widths: ``[T, Hq * Dqk + Hk * (Dqk + Dv)]``.
    """
    num_heads, num_kv_heads = spec.num_qo_heads + 2 * spec.num_kv_heads, spec.num_kv_heads
    shape = (num_heads, spec.qk_head_dim)
    if spec.has_two_widths:
        shape = ((num_heads - num_kv_heads) * spec.qk_head_dim + num_kv_heads * spec.v_head_dim,)
    return row_matcher(spec)(handle, num_rows, *shape)


def heads_of(fused, spec: KernelSpec) -> tuple:
    """Return the arrays in which heads of fused rows are: those of Q and K, and those of V.

    To be called once, after all arguments are matched. Heads count from the first one of Q on.
    """
    rows = TwoWidths.fused(fused, spec) if spec.has_two_widths else fused
    return rows_of(rows, K_PLANE), rows_of(rows, V_PLANE)


def _copied_bytes(spec: KernelSpec) -> int:
    """Bytes that the copy of one row to the pages reads and writes."""
    return spec.qk_head_dim * ITEMSIZE[spec.dtype] + row_bytes(spec)
