# SPDX-License-Identifier: Apache-2.0
"""Batches of token trees for the attention kernels, next to sequences without one."""

from __future__ import annotations

import numpy as np

from tir_kernels.spec import KernelSpec

from .... import reference
from .attention_cases import PagedBatch, RaggedBatch, compiled, indptr, pool_of
from .mla_cases import LatentBatch


def random_parents(rng, num_nodes: int, spread: int = 8) -> list[int]:
    """A forest: each node's parent is one of the `spread` nodes before it, or it is a root."""
    return [int(rng.integers(max(-1, i - spread), i)) for i in range(num_nodes)]


def chain(num_nodes: int) -> list[int]:
    """A tree without branches."""
    return list(range(-1, num_nodes - 1))


class _Trees:
    """The token trees of a batch."""

    def plant(self, parents: list[list[int]]) -> None:
        """Take the parents of each sequence's nodes; their depths become RoPE positions."""
        self.parents, self.is_hidden = parents, False
        self.order_indptr = indptr([len(p) for p in parents])
        orders = [reference.tree_order(p) for p in parents]
        self.order = np.concatenate([np.zeros((0, 2), np.int32), *orders])
        self.k_positions, q_positions = [], []
        sequences = zip(self.k_offsets, self.num_rows, self.kv_lens, parents, strict=True)
        for offset, num_rows, kv_len, tree in sequences:
            before = max(0, kv_len - (len(tree) or num_rows))
            depths = reference.tree_depths(tree or chain(num_rows))
            positions = offset + np.concatenate([np.arange(before), before + depths])
            self.k_positions.append(positions[len(positions) - kv_len :])
            q_positions.append(positions[len(positions) - num_rows :])
        self.q_positions = np.concatenate(q_positions).astype(np.int32)

    def hide_step(self) -> None:
        """Let nobody see this step's nodes, as where only what was before is attended to."""
        self.is_hidden = True
        for b, num_rows in enumerate(self.num_rows):
            end = self.order_indptr[b + 1]
            rows = self.order[max(end - num_rows, self.order_indptr[b]) : end]
            rows[:, 1] = rows[:, 0]

    def mask(self, b: int, window: int | None = None) -> np.ndarray:
        """Return the mask of the rows of a sequence."""
        num_rows, kv_len = self.num_rows[b], self.kv_lens[b]
        mask = reference.tree_mask(self.parents[b], num_rows, kv_len, window, self.k_offsets[b])
        if self.is_hidden and self.parents[b]:
            mask[:, kv_len - num_rows :] = False
        return mask

    def expected(self, inline: bool = False, window: int | None = None):
        """Return the reference's o and lse; ``self.kv(b)`` gives a sequence's K and V."""
        states = []
        for b in range(len(self.parents)):
            rows = slice(self.query_indptr[b], self.query_indptr[b + 1])
            q, (k, v) = self.q[rows], self.kv(b)
            if inline:
                rope = self.reference_rope(True)[0]
                q = reference.rotate(q, self.q_positions[rows], rope)
                k = reference.rotate(k, self.k_positions[b], rope)
            slopes, positions = (
                self.spec.alibi_slopes,
                (self.q_positions[rows], self.k_positions[b]),
            )
            bias = reference.alibi_bias(slopes, *positions)
            mask, softcap = self.mask(b, window), self.spec.logit_softcap
            states.append(reference.attention(q, k, v, mask, self.sm_scale, softcap, bias=bias))
        return tuple(np.concatenate(x) for x in zip(*states, strict=True))


class PagedTrees(_Trees, PagedBatch):
    """Trees whose nodes lie in pages.

    Parameters
    ----------
    trees : (rows of the step, columns before the tree, parents of the nodes) per sequence
    """

    def __init__(self, spec: KernelSpec, trees, seed: int):
        super().__init__(spec, [(n, before + len(p)) for n, before, p in trees], seed)
        self.plant([p for _, _, p in trees])

    def run(self, cpu: str = "native", inline: bool = False, window=None) -> None:
        """Run `tree_paged`, or with a window `tree_paged_sliding`."""
        arrays = (
            self.tensor(self.q),
            self.tensor(self.query_indptr),
            self.tensor(pool_of(self.spec, self.pages)),
            *self._table(),
        )
        outputs = (self.o, self.lse, *self.scalars(causal=None, inline=inline))
        tree = [self.tensor(self.order_indptr), self.tensor(self.order)]
        tree += self.last_arguments(window)
        name = "tree_paged" if window is None else "tree_paged_sliding"
        compiled(name, self.spec, cpu)(*arrays, *outputs, *tree)

    def kv(self, b: int):
        """K and V of a sequence."""
        page_ids = self.page_ids[self.page_indptr[b] : self.page_indptr[b + 1]]
        slots = reference.sequence_slots(page_ids, self.last_page_len[b], self.spec.page_size)
        return reference.gather_slots(self.pages, slots)


class RaggedTrees(_Trees, RaggedBatch):
    """Trees whose last nodes are rows of arrays.

    Parameters
    ----------
    trees : (rows of the step, columns, parents of the nodes) per sequence
    """

    def __init__(self, spec: KernelSpec, trees, seed: int):
        super().__init__(spec, [(n, kv_len) for n, kv_len, _ in trees], seed)
        self.plant([p for _, _, p in trees])

    def run(self, cpu: str = "native", inline: bool = False, window=None) -> None:
        """Run `tree`, or with a window `tree_sliding`."""
        arrays = (self.q, self.query_indptr, self.k, self.v, self.kv_indptr, self.q_positions)
        arrays = [self.tensor(x) for x in (*arrays, self.order_indptr, self.order)]
        scalars = [*self.scalars(causal=None, inline=inline)]
        scalars += self.last_arguments(window)
        name = "tree" if window is None else "tree_sliding"
        compiled(name, self.spec, cpu)(*arrays, self.o, self.lse, *scalars)

    def kv(self, b: int):
        """K and V of a sequence."""
        columns = slice(self.kv_indptr[b], self.kv_indptr[b + 1])
        return self.k[columns], self.v[columns]


class LatentTrees(_Trees, LatentBatch):
    """Trees whose nodes are latent rows in pages; as `PagedTrees`."""

    def __init__(self, spec: KernelSpec, trees, seed: int):
        super().__init__(spec, [(n, before + len(p)) for n, before, p in trees], seed)
        self.k_offsets = np.array([7 * b for b in range(len(trees))], np.int32)
        self.plant([p for _, _, p in trees])

    def run(self, cpu: str = "native", window: int | None = None) -> None:
        """Run `mla_tree`, or with a window `mla_tree_sliding`."""
        table = [self.page_indptr, self.page_ids, self.last_page_len]
        table += [] if window is None else [self.k_offsets, self.q_positions]
        name = "mla_tree" if window is None else "mla_tree_sliding"
        compiled(name, self.spec, cpu)(
            *(
                self.tensor(x)
                for x in (self.q, self.query_indptr, pool_of(self.spec, self.pages), *table)
            ),
            self.o,
            self.lse,
            self.sm_scale,
            self.tensor(self.order_indptr),
            self.tensor(self.order),
            *self.last_arguments(window),
        )

    def kv(self, b: int):
        """Latent rows of a sequence as K and V of one head."""
        slots, page_size = self.slots(b), self.spec.page_size
        k = self.pages[slots // page_size, slots % page_size][:, None]
        return k, k[..., : self.spec.v_head_dim]
