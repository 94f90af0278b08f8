# SPDX-License-Identifier: Apache-2.0
"""Attention among the nodes of token trees, over pages or ragged arrays: `prefill` with their mask.

Both kernels serve stock's conventions and the append-first flow alike: in either, `tree_paged` sees
this step's K and V in the pages already, and `tree` gets them as arrays.
"""

from __future__ import annotations

from types import SimpleNamespace

from tvm.script import tirx as T

from ..masks import WholeSequence
from ..spec import KernelSpec
from ..tree_mask import TreeMask
from .arguments import index_array, page_pool, require_half_conversion, rows_array
from .prefill import emit_paged, emit_ragged, operands
from .prefill_unit import POSITIONS
from .simd import F32


def tree_paged(spec: KernelSpec):
    """Build the kernel `tree_paged`: attention of new tree nodes over the pages of their sequences.

    The pages hold this step's K and V. The rows of a sequence are the last nodes of its uncommitted
    tree, and the tree's n nodes, of this and earlier steps, are its last n columns. A row sees all
    columns before the tree, its ancestors and itself. A sequence with n = 0 is plain causal, as is
    one whose nodes form a chain. Nodes follow their parents; trees may have any size.

    Its arguments are, with T rows, B sequences, P pages of the pool, N page table entries and M
    nodes

    * q ``[T, Hq, D]``, dtype; q_indptr ``[B + 1]``, int32;
    * pages ``[P, 2, Hk, page, D]``, kv_dtype;
    * page_indptr ``[B + 1]``, page_values ``[N]``, length_info ``[B]``, k_rope_pos_offset ``[B]``
      and q_rope_position ``[T]``, int32; int32 arrays may start at any element;
    * o ``[T, Hq, D]``, dtype, and lse ``[T, Hq]``, float32, which are written;
    * rotary_mode: int32, rope_scale, rope_theta, sm_scale: float32;
    * tree_order_indptr ``[B + 1]`` and tree_order ``[M, 2]``, int32: every node's depth-first
      number, from 0 in each sequence, and the end of its subtree. A call in which a sequence has
      fewer nodes than rows, but some, is refused.

    For rotary_mode 1, K of a node is rotated by its depth (which follows from the order) after the
    columns before the tree; q_rope_position should say the same of the rows.

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
    heads, width = spec.num_qo_heads, spec.qk_head_dim
    ops = operands(spec, spec.kv_dtype)

    @T.prim_func(s_tir=True, private=True)
    def attention_tree_paged(
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
        rotary_mode: T.int32,
        rope_scale: T.float32,
        rope_theta: T.float32,
        sm_scale: T.float32,
        tree_order_indptr: T.handle,
        tree_order: T.handle,
    ):
        T.func_attr({"tirx.is_scheduled": True, "tirx.noalias": True})
        batch_size = T.int32()
        num_rows = T.int32()
        num_entries = T.int32()
        emit_paged(
            spec,
            ops,
            SimpleNamespace(
                batch_size=batch_size,
                q=rows_array(q, (num_rows, heads, width), spec.dtype),
                q_indptr=index_array(q_indptr, batch_size + 1),
                pages=page_pool(pages, spec),
                page_indptr=index_array(page_indptr, batch_size + 1),
                page_values=index_array(page_values, num_entries),
                lengths=WholeSequence(spec, length_info, batch_size),
                k_rope_pos_offset=index_array(k_rope_pos_offset, batch_size),
                q_rope_position=index_array(q_rope_position, num_rows),
                o=rows_array(o, (num_rows, heads, width), spec.dtype),
                lse=rows_array(lse, (num_rows, heads), F32),
                mask=TreeMask(tree_order_indptr, tree_order, batch_size + 1, POSITIONS),
                rotary_mode=rotary_mode,
                rope_scale=rope_scale,
                rope_theta=rope_theta,
                sm_scale=sm_scale,
            ),
        )

    return attention_tree_paged


class _FirstPositions:
    """RoPE position of column 0 of a sequence, such that its first row gets its own position."""

    def __init__(self, a: SimpleNamespace):
        self.a = a

    def __getitem__(self, sequence):
        a, mask = self.a, self.a.mask
        num_rows = a.q_indptr[sequence + 1] - a.q_indptr[sequence]
        kv_len = a.kv_indptr[sequence + 1] - a.kv_indptr[sequence]
        num_nodes = mask.indptr[sequence + 1] - mask.indptr[sequence]
        depth = mask.depth[mask.indptr[sequence + 1] - num_rows]
        behind_tree = T.if_then_else(num_nodes > 0, num_nodes - depth, num_rows)
        first = a.q_rope_position[a.q_indptr[sequence]] - (kv_len - behind_tree)
        return T.if_then_else(a.rotary_mode == 1, first, 0)


def tree(spec: KernelSpec):
    """Build the kernel `tree`: attention among tree nodes whose K and V are ragged arrays.

    As `tree_paged`, with all columns of a sequence in k and v; usually these are the step's own
    rows. They may be fewer than the tree has nodes: then they are the last ones, and a row sees its
    ancestors among them. K of a column is rotated by the position that q_rope_position gives the
    first row, plus the difference of their depths.

    Its arguments are, with T rows of Q and S of K and V in B sequences and M nodes

    * q ``[T, Hq, Dqk]``, dtype; q_indptr ``[B + 1]``, int32;
    * k ``[S, Hk, Dqk]``, v ``[S, Hk, Dv]``, dtype; kv_indptr ``[B + 1]``, int32;
    * q_rope_position ``[T]``, tree_order_indptr ``[B + 1]`` and tree_order ``[M, 2]``, int32; int32
      arrays may start at any element;
    * o ``[T, Hq, Dv]``, dtype, and lse ``[T, Hq]``, float32, which are written;
    * rotary_mode: int32, rope_scale, rope_theta, sm_scale: float32.

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
    require_half_conversion(spec, spec.dtype)
    num_qo_heads, num_kv_heads = spec.num_qo_heads, spec.num_kv_heads
    ops = operands(spec, spec.dtype)

    @T.prim_func(s_tir=True, private=True)
    def attention_tree(
        q: T.handle,
        q_indptr: T.handle,
        k: T.handle,
        v: T.handle,
        kv_indptr: T.handle,
        q_rope_position: T.handle,
        tree_order_indptr: T.handle,
        tree_order: T.handle,
        o: T.handle,
        lse: T.handle,
        rotary_mode: T.int32,
        rope_scale: T.float32,
        rope_theta: T.float32,
        sm_scale: T.float32,
    ):
        T.func_attr({"tirx.is_scheduled": True, "tirx.noalias": True})
        num_starts = T.int32()  # a sequence more; no array has one element for each
        num_rows = T.int32()
        num_columns = T.int32()
        emit_ragged_tree(
            spec,
            ops,
            SimpleNamespace(
                batch_size=num_starts - 1,
                q=rows_array(q, (num_rows, num_qo_heads, spec.qk_head_dim), spec.dtype),
                q_indptr=index_array(q_indptr, num_starts),
                k=rows_array(k, (num_columns, num_kv_heads, spec.qk_head_dim), spec.dtype),
                v=rows_array(v, (num_columns, num_kv_heads, spec.v_head_dim), spec.dtype),
                kv_indptr=index_array(kv_indptr, num_starts),
                q_rope_position=index_array(q_rope_position, num_rows),
                o=rows_array(o, (num_rows, num_qo_heads, spec.v_head_dim), spec.dtype),
                lse=rows_array(lse, (num_rows, num_qo_heads), F32),
                mask=TreeMask(tree_order_indptr, tree_order, num_starts, POSITIONS),
                rotary_mode=rotary_mode,
                rope_scale=rope_scale,
                rope_theta=rope_theta,
                sm_scale=sm_scale,
            ),
        )

    return attention_tree


def emit_ragged_tree(spec: KernelSpec, ops, a: SimpleNamespace) -> None:
    """Emit `tree`, which is not told the position of its columns."""
    a.k_rope_pos_offset = _FirstPositions(a)
    emit_ragged(spec, ops, a)
