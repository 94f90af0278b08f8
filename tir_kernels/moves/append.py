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
    row_bytes,
    rows_of,
    slot_offset,
    slot_page,
    view_pages,
)
from ..script import prim_func
from ..signatures.moves import (
    ROPE_APPEND,
    SPLIT_ROTARY,
    TRANSPOSE_APPEND,
    TRANSPOSE_APPEND_MLA,
    AppendInputs,
    SplitInputs,
)
from ..spec import ITEMSIZE, KernelSpec
from ..targets import components_of


def transpose_append(spec: KernelSpec):
    """Build the kernel that writes K and V rows to their slots."""
    num_heads, page_size = spec.num_kv_heads, spec.page_size
    c = components_of(spec)

    @prim_func(arguments=TRANSPOSE_APPEND.of(spec))
    def transpose_append(a: AppendInputs):
        T.func_attr(attributes(spec))
        n = T.meta_var(a.slots.shape[0])
        stored = T.meta_var(view_pages(a.pages, spec))
        worker = c.Worker(spec)
        k_rows = c.RowCopy(worker, a.k, rows_of(stored, K_PLANE), a.kv_scales)
        v_rows = c.RowCopy(worker, a.v, rows_of(stored, V_PLANE), a.kv_scales)
        for row in worker.items(n, 2 * num_heads * _copied_bytes(spec)):
            slot = a.slots[row]
            if slot >= 0:
                page, offset = slot_page(slot, page_size), slot_offset(slot, page_size)
                for h in k_rows.rows(num_heads):
                    k_rows.copy((row, h), (page, K_PLANE, h, offset))
                for h in v_rows.rows(num_heads):
                    v_rows.copy((row, h), (page, V_PLANE, h, offset))

    return transpose_append


def transpose_append_mla(spec: KernelSpec):
    """Build the kernel that writes latent rows to their slots."""
    c, page_size = components_of(spec), spec.page_size

    @prim_func(arguments=TRANSPOSE_APPEND_MLA.of(spec))
    def transpose_append_mla(a: AppendInputs):
        T.func_attr(attributes(spec))
        n = T.meta_var(a.slots.shape[0])
        stored = T.meta_var(view_pages(a.pages, spec))
        worker = c.Worker(spec)
        rows = c.RowCopy(worker, a.kv, stored)
        for row in worker.items(n, _copied_bytes(spec)):
            slot = a.slots[row]
            if slot >= 0:
                page, offset = slot_page(slot, page_size), slot_offset(slot, page_size)
                for _ in rows.rows(1):
                    rows.copy((row,), (page, offset))

    return transpose_append_mla


row_append = transpose_append_mla  # for the rows of convolutions


def split_rotary(spec: KernelSpec):
    """Build the kernel that splits fused rows and rotates Q and K.

    With longrope the largest position of the call chooses the factors of all rows: without a table
    of sequences their lengths are not known.
    """
    num_qo_heads, num_kv_heads = spec.num_qo_heads, spec.num_kv_heads
    first_v, num_heads = num_qo_heads + num_kv_heads, num_qo_heads + 2 * num_kv_heads
    is_longrope = spec.rope.kind == "longrope"
    c = components_of(spec)

    @prim_func(arguments=SPLIT_ROTARY.of(spec))
    def split_rotary(a: SplitInputs):
        T.func_attr(attributes(spec))
        n = T.meta_var(a.rope_positions.shape[0])
        qk_heads, v_heads = T.meta_var(heads_of(a.qkv, spec))
        worker = c.Worker(spec, (qk_heads, a.q, a.k))
        q_rows, k_rows = c.RowRotation(worker, qk_heads, a.q), c.RowRotation(worker, qk_heads, a.k)
        v_rows = c.RowCopy(worker, v_heads, a.v)
        if is_longrope:
            last_position = T.meta_var(worker.largest(a.rope_positions, n))
            is_rotated = T.meta_var(True)
        else:
            last_position = T.meta_var(None)
            is_rotated = T.meta_var(a.apply_rope > 0)
        for row in worker.items(n, num_heads * _copied_bytes(spec)):
            cos_sin = c.CosSin(worker, a.ext_factors)
            if is_rotated:
                cos_sin.fill(a.rope_positions[row], last_position)
            for h in q_rows.rows(num_qo_heads):
                q_rows.write(cos_sin, is_rotated, (row, h), (row, h))
            for h in k_rows.rows(num_kv_heads):
                k_rows.write(cos_sin, is_rotated, (row, num_qo_heads + h), (row, h))
            for h in v_rows.rows(num_kv_heads):
                v_rows.copy((row, first_v + h), (row, h))

    return split_rotary


def rope_append(spec: KernelSpec):
    """Build the kernel that splits fused rows, rotates, and writes K and V to the pages.

    Q of rows without a slot is rotated as well.
    """
    num_qo_heads, num_kv_heads = spec.num_qo_heads, spec.num_kv_heads
    first_v, num_heads = num_qo_heads + num_kv_heads, num_qo_heads + 2 * num_kv_heads
    is_longrope, page_size = spec.rope.kind == "longrope", spec.page_size
    c = components_of(spec)

    @prim_func(arguments=ROPE_APPEND.of(spec))
    def rope_append(a: AppendInputs):
        T.func_attr(attributes(spec))
        n, num_starts = T.meta_var((a.slots.shape[0], a.query_indptr.shape[0]))
        is_rotated = T.meta_var(a.apply_rope > 0)
        stored = T.meta_var(view_pages(a.pages, spec))
        qk_heads, v_heads = T.meta_var(heads_of(a.qkv, spec))
        worker = c.Worker(spec, (qk_heads, a.q, rows_of(stored, K_PLANE)))
        q_rows = c.RowRotation(worker, qk_heads, a.q)
        k_rows = c.RowRotation(worker, qk_heads, rows_of(stored, K_PLANE), a.kv_scales)
        v_rows = c.RowCopy(worker, v_heads, rows_of(stored, V_PLANE), a.kv_scales)
        for row in worker.items(n, num_heads * _copied_bytes(spec)):
            cos_sin = c.CosSin(worker, a.ext_factors)
            last_position = -1
            if is_longrope:
                low, high = 0, T.cast(num_starts, "int32") - 1
                while high - low > 1:  # the sequence whose rows begin at or before this one
                    middle = (low + high) // 2
                    if T.cast(a.query_indptr[middle], "int64") <= row:
                        low = middle
                    else:
                        high = middle
                last_position = a.rope_positions[a.query_indptr[low + 1] - 1]
            if is_rotated:
                cos_sin.fill(a.rope_positions[row], last_position)
            for h in q_rows.rows(num_qo_heads):
                q_rows.write(cos_sin, is_rotated, (row, h), (row, h))
            slot = a.slots[row]
            if slot >= 0:
                page, offset = slot_page(slot, page_size), slot_offset(slot, page_size)
                for h in k_rows.rows(num_kv_heads):
                    k_rows.write(
                        cos_sin, is_rotated, (row, num_qo_heads + h), (page, K_PLANE, h, offset)
                    )
                for h in v_rows.rows(num_kv_heads):
                    v_rows.copy((row, first_v + h), (page, V_PLANE, h, offset))

    return rope_append


def heads_of(fused, spec: KernelSpec) -> tuple:
    """Return the arrays in which heads of fused rows are: those of Q and K, and those of V.

    To be called once, after all arguments are matched. Heads count from the first one of Q on.
    """
    rows = TwoWidths.fused(fused, spec) if spec.has_two_widths else fused
    return rows_of(rows, K_PLANE), rows_of(rows, V_PLANE)


def _copied_bytes(spec: KernelSpec) -> int:
    """Bytes that the copy of one row to the pages reads and writes."""
    return spec.qk_head_dim * ITEMSIZE[spec.dtype] + row_bytes(spec)
