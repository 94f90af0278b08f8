# SPDX-License-Identifier: Apache-2.0
"""Absorbed MLA attention over pages: one latent row per position serves all query heads.

It is the skeleton of `prefill` with all heads in the rows of a tile. The latent row is K, and its
first columns are V, so a tile of it is copied once and multiplied twice.
"""

from __future__ import annotations

from tvm.script import tirx as T

from ..cpu.mla import MLA_PREFILL, MLA_TREE
from ..masks import CausalMask
from ..spec import KernelSpec
from .arguments import attention_kernel
from .columns import TreeColumns
from .prefill import emit_paged


def mla_prefill(spec: KernelSpec):
    """Build the kernel `mla_prefill`; its arguments are those of the CPU's."""

    def emit(a):
        a.mask = CausalMask(a.causal)
        emit_paged(spec, a)

    return attention_kernel(spec, MLA_PREFILL, emit)


def mla_tree(spec: KernelSpec):
    """Build the kernel `mla_tree`; its arguments are those of the CPU's."""

    def emit(a):
        a.mask, a.columns = CausalMask(T.int32(1)), TreeColumns(a)
        emit_paged(spec, a)

    return attention_kernel(spec, MLA_TREE, emit)
