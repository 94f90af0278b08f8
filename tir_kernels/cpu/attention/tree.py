# SPDX-License-Identifier: Apache-2.0
"""Attention among the nodes of token trees, over pages or ragged arrays: `prefill` with their mask.

`tree_paged` and `tree` serve stock's conventions and the append-first flow alike: in either,
`tree_paged` sees this step's K and V in the pages already, and `tree` gets them as arrays.
"""

from __future__ import annotations

from types import SimpleNamespace

from tvm.script import tirx as T

from ...signatures import TREE, TREE_PAGED
from ...spec import KernelSpec
from .define import attention_kernel
from .prefill.kernel import emit_paged, emit_ragged
from .prefill.tile import POSITIONS as TILE
from .tree_mask import TreeMask, TreeWindowMask


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
      number, from 0 in each sequence, and the end of its subtree. A node whose end is its number
      sees its ancestors, but is seen by nobody, itself included. A call in which a sequence has
      fewer nodes than rows, but some, is refused.

    For rotary_mode 1, K of a node is rotated by its depth (which follows from the order) after the
    columns before the tree; q_rope_position should say the same of the rows.
    """

    def emit(a):
        a.mask = TreeMask(a, TILE)
        emit_paged(spec, a, has_trees=True)

    return attention_kernel(spec, TREE_PAGED, emit)


def tree_paged_sliding(spec: KernelSpec):
    """Build the kernel `tree_paged_sliding`: `tree_paged` of layers with a window.

    Its arguments are those of `tree_paged`, then window: int32, at least 1. A row sees of these
    columns those whose position is less than `window` before its own, itself included. Positions
    are those of RoPE, whatever the rotary_mode: q_rope_position of the rows; k_rope_pos_offset plus
    the column before the tree; and of a node its depth more than there are columns before the tree.
    """

    def emit(a):
        a.mask = TreeWindowMask(a, TILE)
        emit_paged(spec, a, has_trees=True)

    return attention_kernel(spec, (*TREE_PAGED, "window"), emit)


class _FirstPositions:
    """Position of column 0 of a sequence, such that its first row gets its own position."""

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
        if mask.has_window or a.rope.has_bias:
            return first
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
    """

    return _tree(spec, TreeMask, TREE)


def tree_sliding(spec: KernelSpec):
    """Build the kernel `tree_sliding`: `tree` of layers with a window.

    Its arguments are those of `tree`, then window: int32, at least 1. A row sees of these columns
    those whose position is less than `window` before its own, as in `tree_paged_sliding`.
    """
    return _tree(spec, TreeWindowMask, (*TREE, "window"))


def _tree(spec: KernelSpec, mask: type[TreeMask], names: tuple[str, ...]):
    def emit(a):
        a.mask = mask(a, TILE)
        a.k_rope_pos_offset = _FirstPositions(a)  # `tree` is not told the position of its columns
        emit_ragged(spec, a)

    return attention_kernel(spec, names, emit)
