# SPDX-License-Identifier: Apache-2.0
"""Attention among the nodes of token trees, over pages or ragged arrays: `prefill` with their mask.

`tree_paged` and `tree` serve stock's conventions and the append-first flow alike: in either,
`tree_paged` sees this step's K and V in the pages already, and `tree` gets them as arrays.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from tvm.script import tirx as T

from ...signatures import tree as signatures
from ...signatures.inputs import PagedInputs, RaggedInputs
from ...spec import KernelSpec
from .define import build
from .prefill.kernel import emit_paged, emit_ragged
from .prefill.tiling import POSITIONS as TILE
from .tree_mask import TreeMask, TreeWindowMask


def tree_paged(spec: KernelSpec):
    """Build the kernel `tree_paged`; its arguments are those of `signatures.tree.tree_paged`."""
    return _tree_paged(spec, TreeMask, signatures.tree_paged)


def tree_paged_sliding(spec: KernelSpec):
    """Build the kernel `tree_paged_sliding`; see `signatures.tree.tree_paged_sliding`."""
    return _tree_paged(spec, TreeWindowMask, signatures.tree_paged_sliding)


def _tree_paged(spec: KernelSpec, mask: type[TreeMask], signature: Callable):
    def attend(a: PagedInputs) -> None:
        emit_paged(spec, replace(a, mask=mask(a, TILE)), has_singles=False)

    return build(spec, signature, attend)


def tree(spec: KernelSpec):
    """Build the kernel `tree`; its arguments are those of `signatures.tree.tree`."""
    return _tree(spec, TreeMask, signatures.tree)


def tree_sliding(spec: KernelSpec):
    """Build the kernel `tree_sliding`; see `signatures.tree.tree_sliding`."""
    return _tree(spec, TreeWindowMask, signatures.tree_sliding)


def _tree(spec: KernelSpec, mask: type[TreeMask], signature: Callable):
    def attend(a: RaggedInputs) -> None:
        mask_of_call = mask(a, TILE)
        # The kernel is not told the position of its columns.
        first = _FirstPositions(a, mask_of_call, has_bias=spec.alibi_slopes is not None)
        emit_ragged(spec, replace(a, mask=mask_of_call, k_rope_pos_offset=first))

    return build(spec, signature, attend, has_pages=False)


class _FirstPositions:
    """Position of column 0 of a sequence, such that its first row gets its own position."""

    def __init__(self, a: RaggedInputs, mask: TreeMask, has_bias: bool):
        self.a, self.mask, self.has_bias = a, mask, has_bias

    def __getitem__(self, sequence):
        a, mask = self.a, self.mask
        num_rows = a.q_indptr[sequence + 1] - a.q_indptr[sequence]
        kv_len = a.kv_indptr[sequence + 1] - a.kv_indptr[sequence]
        num_nodes = mask.indptr[sequence + 1] - mask.indptr[sequence]
        depth = mask.depth[mask.indptr[sequence + 1] - num_rows]
        behind_tree = T.if_then_else(num_nodes > 0, num_nodes - depth, num_rows)
        first = a.q_rope_position[a.q_indptr[sequence]] - (kv_len - behind_tree)
        if mask.has_window or self.has_bias:
            return first
        return T.if_then_else(a.rotary_mode == 1, first, 0)
