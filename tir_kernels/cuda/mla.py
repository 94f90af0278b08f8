# SPDX-License-Identifier: Apache-2.0
"""Absorbed MLA attention over pages: one latent row per position serves all query heads.

It is the skeleton of `prefill` with all heads in the rows of a tile. The latent row is K, and its
first columns are V, so a tile of it is copied once and multiplied twice.
"""

from __future__ import annotations

from ..cpu.mla import MLA_PREFILL, MLA_TREE
from ..masks import CausalMask
from ..spec import KernelSpec
from .prefill import build
from .tree import build_tree


def mla_prefill(spec: KernelSpec):
    """Build the kernel `mla_prefill`; its arguments are those of the CPU's."""
    return build(spec, MLA_PREFILL, lambda a: CausalMask(a.causal))


def mla_tree(spec: KernelSpec):
    """Build the kernel `mla_tree`; its arguments are those of the CPU's."""
    return build_tree(spec, MLA_TREE)
