# SPDX-License-Identifier: Apache-2.0
"""Attention of token trees, over pages or ragged arrays: prefill with the mask of a tree."""

from ...signatures.attention import TREE, TREE_PAGED, TREE_PAGED_SLIDING, TREE_SLIDING
from ...spec import KernelSpec
from .prefill import paged, ragged


def tree_paged(spec: KernelSpec):
    """Build the kernel for new tree nodes over pages that hold this step's K and V already.

    The rows of a sequence are the last nodes of its uncommitted tree, and the tree's n nodes, of
    this and earlier steps, are its last n columns. A row sees all columns before the tree, its
    ancestors and itself. A sequence with n = 0 is plain causal, as is one whose nodes form a chain.
    Nodes follow their parents; trees may have any size. A call in which a sequence has fewer nodes
    than rows, but some, is refused.

    For rotary_mode 1, K of a node is rotated by its depth (which follows from the order) after the
    columns before the tree; query_positions should say the same of the rows.
    """
    return paged(spec, TREE_PAGED)


def tree_paged_sliding(spec: KernelSpec):
    """Build `tree_paged` of layers with a window.

    A row sees of these columns those whose position is less than `window` before its own, itself
    included, or, with a negative `window`, those of its chunk of ``-window`` positions. Positions
    are those of RoPE, whatever the rotary_mode: query_positions of the rows; first_positions plus
    the column before the tree; and of a node its depth more than there are columns before the tree.
    """
    return paged(spec, TREE_PAGED_SLIDING)


def tree(spec: KernelSpec):
    """Build the kernel for tree nodes whose K and V are ragged arrays.

    As `tree_paged`, with all columns of a sequence in k and v; usually these are the step's own
    rows. They may be fewer than the tree has nodes: then they are the last ones, and a row sees its
    ancestors among them. K of a column is rotated by the position that query_positions gives the
    first row, plus the difference of their depths.
    """
    return ragged(spec, TREE)


def tree_sliding(spec: KernelSpec):
    """Build `tree` of layers with a window, as in `tree_paged_sliding`."""
    return ragged(spec, TREE_SLIDING)
