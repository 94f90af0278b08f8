# SPDX-License-Identifier: Apache-2.0
"""The specification of token trees: what a node sees, and where it stands.

A tree is the list of its nodes' parents, -1 for a root; parents come before their children.
"""

from __future__ import annotations

import numpy as np

from .dense_attention import causal_mask, first_seen


def tree_mask(
    parents, num_rows: int, kv_len: int, window: int | None = None, offset: int = 0
) -> np.ndarray:
    """``[num_rows, kv_len]``: the rows are the last nodes of a tree, the nodes the last positions.

    Every node sees what comes before the tree, its ancestors and itself; without nodes the mask is
    causal. `parents` gives every node's parent, -1 for a root. Nodes before the first position are
    left out. With a window a row sees what `first_seen` says of its place in `tree_positions`; the
    first column, or the first node if they are more, is at `offset`.
    """
    if len(parents) == 0:
        return causal_mask(num_rows, kv_len, window, offset)
    n = len(parents)
    sees = np.eye(n, dtype=bool)
    for node, parent in enumerate(parents):
        if parent >= 0:
            sees[node] |= sees[parent]
    before = np.ones((num_rows, max(0, kv_len - n)), bool)
    mask = np.concatenate([before, sees[n - num_rows :, max(0, n - kv_len) :]], axis=1)
    if window is not None:
        positions = offset + tree_positions(parents, max(n, kv_len))
        end = len(positions)
        mask &= positions[end - kv_len :] >= first_seen(positions[end - num_rows :, None], window)
    return mask


def tree_positions(parents, kv_len: int) -> np.ndarray:
    """``[kv_len]``: RoPE positions when the last ones are the nodes of a tree, by their depth."""
    before = kv_len - len(parents)
    return np.concatenate([np.arange(before), before + tree_depths(parents)])


def tree_path(parents, leaf: int) -> list[int]:
    """The nodes from the root above `leaf` down to it; -1 has none."""
    return [] if leaf < 0 else [*tree_path(parents, parents[leaf]), leaf]


def tree_depths(parents) -> np.ndarray:
    """Number of ancestors of every node."""
    depths = []
    for parent in parents:
        depths.append(depths[parent] + 1 if parent >= 0 else 0)
    return np.array(depths, np.int32)


def tree_order(parents) -> np.ndarray:
    """int32 ``[n, 2]``: every node's depth-first number, and the end of its subtree."""
    order = np.zeros((len(parents), 2), np.int32)
    sizes = np.ones(len(parents), np.int32)
    for node in reversed(range(len(parents))):
        if parents[node] >= 0:
            sizes[parents[node]] += sizes[node]
    following = {-1: 0}  # next number in the subtree of a node
    for node, parent in enumerate(parents):
        order[node] = following[parent], following[parent] + sizes[node]
        following[parent] += sizes[node]
        following[node] = order[node, 0] + 1
    return order
