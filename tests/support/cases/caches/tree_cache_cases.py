# SPDX-License-Identifier: Apache-2.0
"""A cache over NumPy kernels and its reference, driven alike through steps with token trees."""

from __future__ import annotations

import numpy as np
import pytest

from .... import reference
from ...emulators.python_kernels import MLA_LAYER, make_cache, poison, shuffle, snapshot
from ...emulators.python_tree_kernels import KERNELS_WITH_TREES, MLA_KERNELS_WITH_TREES
from .cache_cases import MODES, ROPE, CachePair, layer_of


class TreePair(CachePair):
    """Layers with K and V; `windows` has one for each (0: none)."""

    kernels, reference_class = KERNELS_WITH_TREES, reference.ReferenceCache

    def __init__(self, windows=(0, 0), mode: str = "none", seed: int = 0, kernels=None, **fields):
        cache = make_cache(
            self.kernels if kernels is None else [kernels],
            layers=[self.layer_of(window) for window in windows],
            rope_mode=MODES[mode],
            **{"max_total_tokens": 256, "prefill_chunk_size": 64, **fields},
        )
        shuffle(cache, seed)
        dtype = np.dtype("float32")
        super().__init__(
            cache, self.reference_class(len(windows), dtype, ROPE, mode, windows), seed
        )

    def layer_of(self, window: int) -> dict:
        return layer_of(window)

    def commit(self, leaves: dict[int, int]) -> None:
        """Commit, then compare all rows."""
        self.cache.commit_tree(list(leaves), list(leaves.values()))
        for seq_id, leaf in leaves.items():
            self.expected.commit_tree(seq_id, leaf)
        self.cache.check_integrity()
        poison(self.cache)
        self.check_rows()

    def step(self, trees: dict[int, list[int]] | dict[int, int]) -> None:
        """A step of plain rows (how many by sequence) or of tree nodes (their parents)."""
        seq_ids, lengths, parents = split(trees)
        if parents is not None:
            self.expected.grow_trees(seq_ids, lengths, parents)
        with self.cache.forward(seq_ids, lengths, parents):
            self.check_positions(seq_ids, lengths)
            for layer in range(self.expected.num_layers):
                self.attend(layer, seq_ids, lengths)
            self.cache.check_integrity()
        self.cache.check_integrity()
        poison(self.cache)

    def check_positions(self, seq_ids, lengths) -> None:
        positions = []
        for seq_id, num_rows in zip(seq_ids, lengths, strict=True):
            tree, total = self.expected.trees[seq_id], self.cache.sequence_length(seq_id)
            positions += [*reference.tree_positions(tree, total)[total - num_rows :]]
        assert self.cache.query_positions().numpy().tolist() == positions

    def first_kept(self, seq_id: int) -> int:
        groups = range(len(self.cache.stats()["groups"]))
        return max(self.cache.first_position(seq_id, group) for group in groups)

    def get_rows(self, seq_id: int, begin: int) -> tuple[np.ndarray, ...]:
        return tuple(x.numpy() for x in self.cache.debug_get_kv(seq_id, begin))

    def check_rows(self) -> None:
        """Every sequence holds what the reference holds."""
        for seq_id in self.expected.sequences:
            assert self.cache.sequence_length(seq_id) == self.expected.length(seq_id)
            begin = self.first_kept(seq_id)
            actual = self.get_rows(seq_id, begin)
            for layer in range(self.expected.num_layers):
                rows = self.expected.sequences[seq_id][layer]
                for got, want in zip(actual, rows or (), strict=rows is not None):
                    np.testing.assert_array_equal(got[layer], want[begin:])

    def snapshot(self) -> dict:
        return snapshot(self.cache, list(self.expected.sequences))


class LatentTreePair(TreePair):
    """MLA layers; cross attention alone covers a step with trees, or follows self attention."""

    kernels, reference_class = MLA_KERNELS_WITH_TREES, reference.ReferenceLatentCache
    is_split = False

    def layer_of(self, window: int) -> dict:
        return {**MLA_LAYER, "window": window}

    def attend(self, layer: int, seq_ids, lengths) -> None:
        num_rows, has_trees = sum(lengths), any(self.expected.trees[i] for i in seq_ids)
        latent, q = self.normal(num_rows, 24), self.normal(num_rows, 4, 24)
        self.cache.append_mla_kv(layer, latent)
        self.expected.append(layer, seq_ids, lengths, latent)
        is_whole = (has_trees or num_rows == len(seq_ids)) and not self.is_split
        if not is_whole:
            k = self.normal(num_rows, 4, 16)
            self.cache.self_attention(layer, k, k, k[:, :, :8])
        out = [x.numpy() for x in self.cache.cross_attention(layer, q, 0.25)]
        want = self.expected.absorbed(layer, seq_ids, lengths, q, 16, 0.25, with_step=is_whole)
        for got, expected in zip(out, want, strict=True):
            reference.assert_close(got, expected, "float32", f"layer {layer} of {seq_ids}")

    def get_rows(self, seq_id: int, begin: int) -> tuple[np.ndarray, ...]:
        return (self.cache.debug_get_kv_mla(seq_id, begin).numpy(),)


def split(trees) -> tuple[list[int], list[int], list[int] | None]:
    """Ids, append lengths and parents of a step."""
    values = list(trees.values())
    if isinstance(values[0], int):
        return list(trees), values, None
    return list(trees), [len(p) for p in values], [int(p) for tree in values for p in tree]


# Two layers without a window, both kinds in one cache, and windows alone; and latent rows.
PAIRS = {
    "global": lambda **fields: TreePair((0, 0), **fields),
    "mixed": lambda **fields: TreePair((0, 5, 0, 2), **fields),
    "sliding": lambda **fields: TreePair((3, 3), **fields),
    "mla": lambda **fields: LatentTreePair((0, 5), **fields),
}
parametrize_pair = pytest.mark.parametrize("make", PAIRS.values(), ids=PAIRS)


def grown(make=PAIRS["global"], **fields) -> TreePair:
    """Three sequences with nodes of two rounds, in one batch with new sequences and chains."""
    pair = make(**fields)
    pair.add(0, 1, 2)
    pair.step({0: 30, 1: 7})
    pair.step({0: [-1, 0, 0, 1], 1: [-1, 0, -1]})
    pair.step({2: [-1, -1, 0], 1: [2, 2], 0: [3]})
    return pair
