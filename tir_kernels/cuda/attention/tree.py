# SPDX-License-Identifier: Apache-2.0
"""Attention among the nodes of token trees, over pages or ragged arrays: `prefill` with columns."""

from __future__ import annotations

from tvm.script import tirx as T

from ...semantics.visibility import CausalMask
from ...signatures import TREE, TREE_PAGED
from ...spec import KernelSpec
from .prefill import build, emit_paged, emit_ragged
from .tree_mask import TreeColumns

TREE_ROWS = 64  # of a block: trees have few nodes, and their masks take registers


def tree_paged(spec: KernelSpec):
    """Build the kernel `tree_paged`; its arguments are those of the CPU's.

    Of a sequence with fewer nodes than rows, but some, the results are of no use.
    """
    return build_tree(spec, TREE_PAGED)


def tree_paged_sliding(spec: KernelSpec):
    """Build the kernel `tree_paged_sliding`; its arguments are those of the CPU's."""
    return build_tree(spec, (*TREE_PAGED, "window"))


def tree(spec: KernelSpec):
    """Build the kernel `tree`; its arguments are those of the CPU's."""
    return build_tree(spec, TREE, emit_ragged)


def tree_sliding(spec: KernelSpec):
    """Build the kernel `tree_sliding`; its arguments are those of the CPU's."""
    return build_tree(spec, (*TREE, "window"), emit_ragged)


def build_tree(spec: KernelSpec, names, emit=emit_paged):
    """Build a kernel whose columns are trees; without one, sequences are plain causal."""

    def mask_of(a):
        a.columns = TreeColumns(a)
        return CausalMask(T.int32(1))

    return build(spec, names, mask_of, emit, most_rows=TREE_ROWS)
