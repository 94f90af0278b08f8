# SPDX-License-Identifier: Apache-2.0
"""Random operations with token trees: rounds, commits, forks, pops, and calls that fail."""

from __future__ import annotations

import numpy as np
import pytest

import tvm_pagedkv as pkv

from .python_kernels import poison, shuffle, snapshot
from .python_tree_kernels import KERNELS_WITH_TREES, MLA_KERNELS_WITH_TREES
from .test_cache_random import CHUNK, WINDOWS, Driver, LatentDriver

NUM_OPERATIONS = 500


class TreeDriver(Driver):
    """Steps with trees and commits among the operations of `Driver`."""

    def __init__(self, *args):
        self.moves_left = -1  # calls of compact_copy until one fails
        self.kernels = {**self.tree_kernels, "compact_copy": self.compact_copy}
        super().__init__(*args)

    tree_kernels = KERNELS_WITH_TREES

    def compact_copy(self, *args) -> None:
        KERNELS_WITH_TREES["compact_copy"](*args)
        self.moves_left -= 1
        if self.moves_left == 0:
            raise RuntimeError("the move fails")

    def may_fill_first(self, message: str) -> bool:
        """Nodes of many rounds may fill the pages of a window."""
        return True

    def with_nodes(self) -> list[int]:
        return [seq_id for seq_id in self.ids if self.expected.trees[seq_id]]

    def draw_batch(self) -> list[int]:
        """Of a step without trees: sequences without nodes."""
        free = [seq_id for seq_id in self.ids if not self.expected.trees[seq_id]]
        return [int(i) for i in self.rng.permutation(free)[: self.rng.integers(1, len(free) + 1)]]

    def step(self) -> None:
        if len(self.with_nodes()) < len(self.ids):
            super().step()

    def fail_copy(self) -> None:
        if len(self.with_nodes()) < len(self.ids):
            super().fail_copy()

    def tree_step(self) -> None:
        """Nodes under any earlier ones, or chains."""
        if not self.ids:
            return
        batch = super().draw_batch()
        lengths, parents = [], []
        for seq_id in batch:
            num_rows = int(self.rng.integers(1, CHUNK // len(batch) + 1))
            first = len(self.expected.trees[seq_id])
            is_chain = self.rng.random() < 0.4
            lengths.append(num_rows)
            for node in range(first, first + num_rows):
                parents.append(node - 1 if is_chain else int(self.rng.integers(-1, node)))
        if self.rng.random() < 0.1:
            self.refuse_tree(batch, lengths, parents)
        self.run_step(batch, lengths, parents)

    def refuse_tree(self, batch, lengths, parents) -> None:
        """One wrong parent, or one too many or too few."""
        row = int(self.rng.integers(len(parents)))
        owner = int(np.searchsorted(np.cumsum(lengths), row, side="right"))
        node = len(self.expected.trees[batch[owner]]) + row - sum(lengths[:owner])
        bad = [*parents]
        bad[row] = int(self.rng.choice([node, node + 7, -2, 2**40]))
        before = snapshot(self.cache, self.ids)
        for wrong in (bad, parents[:-1], [*parents, -1]):
            with pytest.raises(ValueError, match="parent"):
                self.cache.begin_forward(batch, lengths, wrong)
        assert snapshot(self.cache, self.ids) == before

    def commit(self) -> None:
        """Some sequences in any order, with any nodes as leaves; maybe a kernel fails at first."""
        if not self.ids:
            return
        batch = super().draw_batch()
        leaves = [
            int(self.rng.integers(-1, len(self.expected.trees[seq_id])))
            if self.rng.random() < 0.8
            else -1
            for seq_id in batch
        ]
        before = snapshot(self.cache, self.ids)
        if self.rng.random() < 0.3:
            self.moves_left = int(self.rng.integers(1, self.num_layers + 1))
        try:
            self.cache.commit_tree(batch, leaves)
        except pkv.CacheFullError:
            self.counts["full commit"] = self.counts.get("full commit", 0) + 1
            assert snapshot(self.cache, self.ids) == before
            return
        except RuntimeError:
            self.counts["failed move"] = self.counts.get("failed move", 0) + 1
            assert snapshot(self.cache, self.ids) == before
            self.cache.check_integrity()
            self.moves_left = -1
            self.cache.commit_tree(batch, leaves)
        finally:
            self.moves_left = -1
        for seq_id, leaf in zip(batch, leaves, strict=True):
            self.expected.commit_tree(seq_id, leaf)
            self.forget(seq_id)
        self.slide(batch)

    def refuse(self) -> None:
        """What a sequence with nodes, or without, does not allow."""
        if not self.ids:
            return
        seq_id = self.pick()
        length, num_nodes = self.expected.length(seq_id), len(self.expected.trees[seq_id])
        calls = [
            lambda: self.cache.commit_tree([seq_id], [num_nodes]),
            lambda: self.cache.commit_tree([seq_id, seq_id], [-1, -1]),
            lambda: self.cache.commit_tree([seq_id], []),
        ]
        if num_nodes:
            committed = length - num_nodes
            position = int(self.rng.choice([-1, *range(committed + 1, length + 1)]))
            calls += [
                lambda: self.cache.begin_forward([seq_id], [1]),
                lambda: self.cache.fork_sequence(seq_id, 10**8, position),
            ]
        before = snapshot(self.cache, self.ids)
        with pytest.raises(ValueError):
            calls[self.rng.integers(len(calls))]()
        assert snapshot(self.cache, self.ids) == before

    def run(self) -> None:
        operations = {
            self.tree_step: 0.34, self.commit: 0.2, self.step: 0.12, self.add: 0.08,
            self.fork: 0.08, self.pop: 0.06, self.remove: 0.03, self.write: 0.03,
            self.refuse: 0.03, self.fail_copy: 0.03,
        }  # fmt: skip
        for i in range(NUM_OPERATIONS):
            operation = self.rng.choice(list(operations), p=list(operations.values()))
            operation()
            self.counts[operation.__name__] = self.counts.get(operation.__name__, 0) + 1
            self.cache.check_integrity()
            self.check_counters()
            stats = self.cache.stats()
            assert stats["uncommitted_tree_nodes"] == sum(map(len, self.expected.trees.values()))
            if i % 5 == 0:
                shuffle(self.cache, i)
                poison(self.cache)
            if i % 10 == 0:
                self.check_rows()


class LatentTreeDriver(TreeDriver, LatentDriver):
    """The same for MLA layers: cross attention alone, or after self attention."""

    tree_kernels = MLA_KERNELS_WITH_TREES

    def covers_step(self, batch: list[int], lengths: list[int]) -> bool:
        return any(self.expected.trees[seq_id] for seq_id in batch) or super().covers_step(
            batch, lengths
        )


def check(driver: TreeDriver) -> None:
    driver.run()
    stats = driver.cache.stats()
    print(driver.counts, stats)
    assert stats["moved_tree_nodes"] > 20 and stats["dropped_tree_nodes"] > 20
    assert driver.counts["failed move"] > 0
    assert driver.page_size == 1 or stats["cow_page_copies"] > 0


@pytest.mark.parametrize("page_size, aux_manager", [(1, "merged"), (4, "plain"), (16, "merged")])
@pytest.mark.parametrize("windows", WINDOWS)
@pytest.mark.parametrize("seed", range(2))
def test_random_trees(seed, windows, page_size, aux_manager):
    check(TreeDriver(seed, page_size, aux_manager, WINDOWS[windows]))


@pytest.mark.parametrize("page_size", [1, 4])
@pytest.mark.parametrize("seed", range(2))
def test_random_trees_with_mla(seed, page_size):
    check(LatentTreeDriver(seed, page_size, "merged", WINDOWS["global"]))
