# SPDX-License-Identifier: Apache-2.0
"""A cache over NumPy kernels and its reference, driven alike through steps with token trees."""

from __future__ import annotations

import numpy as np

from . import reference
from .python_kernels import LAYER, MLA_LAYER, make_cache, poison, shuffle, snapshot
from .python_tree_kernels import KERNELS_WITH_TREES, MLA_KERNELS_WITH_TREES

HEADS, DIM = 4 + 2 * 2, 8
MODES = {"none": 0, "normal": 1, "inline": 2}


def layer_of(window: int) -> dict:
    return {**LAYER, "kind": "mha_sliding", "window": window} if window else LAYER


class TreePair:
    """Layers with K and V; `windows` has one for each (0: none)."""

    kernels, reference_class = KERNELS_WITH_TREES, reference.ReferenceCache

    def __init__(self, windows=(0, 0), mode: str = "none", seed: int = 0, kernels=None, **fields):
        self.windows, self.rng = windows, np.random.default_rng(seed)
        self.cache = make_cache(
            self.kernels if kernels is None else [kernels],
            layers=[self.layer_of(window) for window in windows],
            rope_mode=MODES[mode],
            **{"max_total_tokens": 256, "prefill_chunk_size": 64, **fields},
        )
        shuffle(self.cache, seed)
        rope = reference.Rope(rotary_dim=DIM)
        self.expected = self.reference_class(len(windows), np.dtype("float32"), rope, mode, windows)

    def layer_of(self, window: int) -> dict:
        return layer_of(window)

    def add(self, *seq_ids: int) -> None:
        for seq_id in seq_ids:
            self.cache.add_sequence(seq_id)
            self.expected.add_sequence(seq_id)

    def fork(self, parent: int, child: int, position: int = -1) -> None:
        self.cache.fork_sequence(parent, child, position)
        self.expected.fork_sequence(parent, child, position)

    def pop(self, seq_id: int, n: int) -> None:
        self.cache.pop_n(seq_id, n)
        self.expected.pop_n(seq_id, n)

    def remove(self, seq_id: int) -> None:
        self.cache.remove_sequence(seq_id)
        self.expected.remove_sequence(seq_id)

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
            for layer in range(len(self.windows)):
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

    def qkv(self, num_rows: int) -> np.ndarray:
        return self.rng.standard_normal((num_rows, HEADS, DIM)).astype("float32")

    def attend(self, layer: int, seq_ids, lengths) -> None:
        qkv = self.qkv(sum(lengths))
        out = self.cache.attention(layer, qkv).numpy()
        o, _ = self.expected.attention(layer, seq_ids, lengths, qkv, 2, DIM**-0.5)
        reference.assert_close(out, o, "float32", f"layer {layer} of {seq_ids}")

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
            for layer in range(len(self.windows)):
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
        return MLA_LAYER

    def attend(self, layer: int, seq_ids, lengths) -> None:
        num_rows, has_trees = sum(lengths), any(self.expected.trees[i] for i in seq_ids)
        latent = self.rng.standard_normal((num_rows, 24)).astype("float32")
        q = self.rng.standard_normal((num_rows, 4, 24)).astype("float32")
        self.cache.append_mla_kv(layer, latent)
        self.expected.append(layer, seq_ids, lengths, latent)
        is_whole = (has_trees or num_rows == len(seq_ids)) and not self.is_split
        if not is_whole:
            k = self.rng.standard_normal((num_rows, 4, 16)).astype("float32")
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
