# SPDX-License-Identifier: Apache-2.0
"""The operations of a random world that take the cache through steps: plain ones and trees."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import tvm

from ... import reference
from .random_layers import draw_layer
from .random_world import CHUNK, MAX_BATCH, KernelFails, Operation, World

NEW = 10**8


def draw_batch(world: World, ids: list[int]) -> list[int]:
    """Sequences of a step: often those of the last one; now and then more than it may have."""
    if world.last_batch and set(world.last_batch) <= set(ids) and world.chance(0.3):
        return list(world.last_batch)
    batch = world.pick_some(ids)
    return batch if world.chance(0.03) else batch[:MAX_BATCH]


def draw_lengths(world: World, batch: list[int]) -> list[int]:
    if world.chance(0.5):
        return [1] * len(batch)
    most = max(1, CHUNK // len(batch))
    return [int(world.rng.integers(1, most + 1)) for _ in batch]


class Step(Operation):
    """A step through all layers; in some of them a kernel fails first and is then called again."""

    weight, needs_pages = 0.30, True

    def outcomes(self, world: World) -> set[str]:
        return {"done", "refused", "full", "a kernel fails"}

    def draw(self, world: World) -> Any:
        ids = [i for i in world.ids if not world.tree(i) or world.chance(0.03)]
        if not ids:
            return None
        batch = draw_batch(world, ids)
        if any(kept.window for kept in world.kept) and world.chance(0.25):
            batch = [max(ids, key=world.length)]  # windows slide over long sequences
        lengths = draw_lengths(world, batch)
        return batch, lengths, None, self.draw_layers(world, batch, lengths, has_trees=False)

    def draw_layers(self, world: World, batch, lengths, has_trees: bool) -> list:
        return [draw_layer(world, i, batch, lengths, has_trees) for i in range(len(world.layers))]

    def refusal(self, world: World, args: Any) -> type[Exception] | None:
        is_too_large = len(args[0]) > MAX_BATCH
        return ValueError if is_too_large or any(map(world.tree, args[0])) else None

    def apply(self, world: World, args: Any) -> None:
        batch, lengths, parents, layers = args
        with world.failing(int(world.rng.integers(2)) if world.chance(0.5) else None):
            world.cache.begin_forward(batch, lengths, parents)
        positions = self.positions(world, batch, lengths, parents)
        if world.can_stop:
            np.testing.assert_array_equal(world.cache.query_positions().numpy(), positions)
        for layer in layers:
            if world.chance(0.2):
                self.fail(world, lambda layer=layer: layer.run(world, positions))
            layer.run(world, positions)
            if world.chance(0.02):
                self.make_mistakes(world, batch)
        world.cache.check_integrity()
        world.cache.end_forward()

    def positions(self, world: World, batch, lengths, parents) -> np.ndarray:
        positions, start = [], 0
        for seq_id, num_rows in zip(batch, lengths, strict=True):
            tree, total = list(world.tree(seq_id)), world.length(seq_id) + num_rows
            if parents is not None:
                tree += parents[start : start + num_rows]
            start += num_rows
            rows = reference.tree_positions(tree, total)[total - num_rows :]
            if "inline" not in world.modes:  # they count what a window has dropped too
                rows = rows + world.text_length(seq_id, total) - total
            positions.append(rows)
        return np.concatenate(positions)

    def state(self, world: World) -> tuple:
        """But for the rows of this step, which may be there, and the size of arrays."""
        stats, *others = world.state()[:-1]
        return {key: stats[key] for key in stats if "bytes" not in key}, *others

    def fail(self, world: World, run) -> None:
        """Let one of the layer's kernels fail, at the append or at the attention."""
        before = self.state(world)
        try:
            with world.failing(int(world.rng.integers(5))):
                run()
        except KernelFails:
            assert self.state(world) == before

    def make_mistakes(self, world: World, batch: list[int]) -> None:
        """Make calls that are refused within a step."""
        cache, some, before = world.cache, batch[0], world.state()
        tensor = tvm.runtime.tensor(np.zeros((1, 1, world.shapes.dim), "f4"))
        for error, call in (
            (ValueError, lambda: cache.begin_forward([some], [1])),
            (ValueError, lambda: cache.add_sequence(NEW)),
            (ValueError, lambda: cache.fork_sequence(some, NEW, 0)),
            (ValueError, lambda: cache.pop_n(some, 1)),
            (ValueError, lambda: cache.remove_sequence(some)),
            (ValueError, lambda: cache.clear()),
            (ValueError, lambda: cache.commit_tree([some], [-1])),
            (ValueError, lambda: cache.attention(0, tensor, 1.0, tensor)),
            (IndexError, lambda: cache.attention(99, tensor, 1.0, tensor)),
        ):
            with pytest.raises(error):
                call()
            assert world.state() == before
            world.failures["a mistake in a step"] += 1

    def check(self, world: World, args: Any, result: None) -> None:
        batch, _, _, layers = args
        for layer in layers:
            layer.check(world)
        world.slide(batch)
        world.last_batch = batch


class TreeStep(Step):
    """Appends token tree nodes: chains, or any trees, on top of those of earlier steps."""

    weight = 0.16

    def draw(self, world: World) -> Any:
        ids = [i for i in world.ids if world.is_whole(i) or world.chance(0.03)]
        if not ids:
            return None
        batch = draw_batch(world, ids)
        lengths = draw_lengths(world, batch)
        is_chain = world.chance(0.2)
        parents = []
        for seq_id, num_rows in zip(batch, lengths, strict=True):
            size = len(world.tree(seq_id))
            for node in range(size, size + num_rows):
                parent = node - 1 if is_chain else int(world.rng.integers(-1, node))
                parents.append(parent)
        if world.chance(0.1):
            self.spoil(world, batch, lengths, parents)
        return batch, lengths, parents, self.draw_layers(world, batch, lengths, has_trees=True)

    def spoil(self, world: World, batch, lengths, parents: list[int]) -> None:
        row = int(world.rng.integers(lengths[0]))
        node = len(world.tree(batch[0])) + row
        parents[row] = int(world.pick([-2, node, node + 1, 2**31 + node, -(2**62)]))
        if world.chance(0.3):
            del parents[-1]

    def is_bad(self, world: World, batch, lengths, parents: list[int]) -> bool:
        if len(parents) != sum(lengths):
            return True
        start = 0
        for seq_id, num_rows in zip(batch, lengths, strict=True):
            first = len(world.tree(seq_id))
            for row in range(num_rows):
                if not -1 <= parents[start + row] < first + row:
                    return True
            start += num_rows
        return False

    def refusal(self, world: World, args: Any) -> type[Exception] | None:
        is_bad = self.is_bad(world, *args[:3]) or not all(map(world.is_whole, args[0]))
        return ValueError if is_bad or len(args[0]) > MAX_BATCH else None

    def check(self, world: World, args: Any, result: None) -> None:
        for each in world.references:
            each.grow_trees(*args[:3])
        super().check(world, args, result)


class Commit(Operation):
    """Commits the trees of some sequences, in any order, and of others that have none."""

    weight, needs_pages = 0.12, True

    def outcomes(self, world: World) -> set[str]:
        return {"done", "refused", "a kernel fails"}

    def draw(self, world: World) -> Any:
        ids = [i for i in world.ids if world.tree(i) or world.chance(0.2)]
        if not ids:
            return None
        batch = world.pick_some(ids)
        leaves = [int(world.rng.integers(-1, len(world.tree(i)))) for i in batch]
        fails_after = None
        if world.chance(0.1):
            bad = [-2, len(world.tree(batch[0])), 2**40]
            leaves[0] = world.pick(bad)
        elif world.chance(0.05):
            batch, leaves = [*batch, batch[0]], [*leaves, leaves[0]]
        elif world.chance(0.4):
            fails_after = int(world.rng.integers(4))
        return batch, leaves, fails_after

    def refusal(self, world: World, args: Any) -> type[Exception] | None:
        batch, leaves, _ = args
        is_bad = len(set(batch)) < len(batch) or any(
            not -1 <= leaf < len(world.tree(i)) for i, leaf in zip(batch, leaves, strict=True)
        )
        return ValueError if is_bad else None

    def apply(self, world: World, args: Any) -> None:
        batch, leaves, fails_after = args
        with world.failing(fails_after):
            world.cache.commit_tree(batch, leaves)

    def check(self, world: World, args: Any, result: None) -> None:
        batch, leaves, _ = args
        for each in world.references:
            for seq_id, leaf in zip(batch, leaves, strict=True):
                each.commit_tree(seq_id, leaf)
        world.shorten(batch)
        world.slide(batch)
