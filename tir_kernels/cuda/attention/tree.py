# SPDX-License-Identifier: Apache-2.0
"""Attention among the nodes of token trees, over pages or ragged arrays: `prefill` with trees."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from tvm.script import tirx as T

from ...semantics.visibility import CausalMask
from ...signatures import tree as signatures
from ...signatures.inputs import PagedInputs, RaggedInputs
from ...spec import KernelSpec
from .prefill import emit_paged, emit_ragged
from .tree_mask import TreeMask

TREE_ROWS = 64  # of a block: trees have few nodes, and their masks take registers


def tree_paged(spec: KernelSpec):
    """Build the kernel `tree_paged`; its arguments are those of `signatures.tree.tree_paged`."""
    return build_tree(spec, signatures.tree_paged)


def tree_paged_sliding(spec: KernelSpec):
    """Build the kernel `tree_paged_sliding`; see `signatures.tree.tree_paged_sliding`."""
    return build_tree(spec, signatures.tree_paged_sliding)


def tree(spec: KernelSpec):
    """Build the kernel `tree`; its arguments are those of `signatures.tree.tree`."""
    return build_tree(spec, signatures.tree, emit_ragged)


def tree_sliding(spec: KernelSpec):
    """Build the kernel `tree_sliding`; see `signatures.tree.tree_sliding`."""
    return build_tree(spec, signatures.tree_sliding, emit_ragged)


def build_tree(spec: KernelSpec, signature: Callable, emit: Callable = emit_paged):
    """Build a kernel whose last columns are nodes of trees; without a tree, rows are causal."""

    def attend(a: PagedInputs | RaggedInputs) -> None:
        a = replace(a, tree=TreeMask(a), mask=CausalMask(T.int32(1)))
        emit(spec, a, max_rows=TREE_ROWS)

    return signature(spec, attend)
