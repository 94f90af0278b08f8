# SPDX-License-Identifier: Apache-2.0
"""Attention among the nodes of token trees, over pages or ragged arrays: `prefill` with columns."""

from __future__ import annotations

from tvm.script import tirx as T

from ..cpu.tree import TREE, TREE_PAGED
from ..masks import CausalMask
from ..spec import KernelSpec
from .arguments import attention_kernel
from .columns import TreeColumns
from .prefill import emit_paged, emit_ragged


def tree_paged(spec: KernelSpec):
    """Build the kernel `tree_paged`; its arguments are those of the CPU's.

    Of a sequence with fewer nodes than rows, but some, the results are of no use.
    """
    return _build(spec, TREE_PAGED, emit_paged)


def tree_paged_sliding(spec: KernelSpec):
    """Build the kernel `tree_paged_sliding`; its arguments are those of the CPU's."""
    return _build(spec, (*TREE_PAGED, "window"), emit_paged)


def tree(spec: KernelSpec):
    """Build the kernel `tree`; its arguments are those of the CPU's."""
    return _build(spec, TREE, emit_ragged)


def tree_sliding(spec: KernelSpec):
    """Build the kernel `tree_sliding`; its arguments are those of the CPU's."""
    return _build(spec, (*TREE, "window"), emit_ragged)


def _build(spec: KernelSpec, names: tuple[str, ...], emit_attention):
    def emit(a):
        a.mask, a.columns = CausalMask(T.int32(1)), TreeColumns(a)
        emit_attention(spec, a)

    return attention_kernel(spec, names, emit)
