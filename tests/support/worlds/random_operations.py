# SPDX-License-Identifier: Apache-2.0
"""The operations of a random world between steps: sequences, rows from outside, and mistakes."""

from __future__ import annotations

from typing import Any

import numpy as np

from .random_shapes import is_latent
from .random_world import CHUNK, MAX_BATCH, Operation, World

UNKNOWN, NEW = 10**9, 10**8


class Add(Operation):
    weight = 0.10

    def outcomes(self, world: World) -> set[str]:
        return {"done"}

    def draw(self, world: World) -> Any:
        return None if world.is_crowded and world.chance(0.9) else world.new_id()

    def apply(self, world: World, seq_id: int) -> None:
        world.cache.add_sequence(seq_id)

    def check(self, world: World, seq_id: int, result: None) -> None:
        world.add(seq_id)


class Remove(Operation):
    """Also of sequences that are being imported."""

    weight = 0.05

    def outcomes(self, world: World) -> set[str]:
        return {"done"}

    def draw(self, world: World) -> Any:
        ids = [*world.ids, *world.importing]
        return world.pick(ids) if len(ids) > 2 else None

    def apply(self, world: World, seq_id: int) -> None:
        world.cache.remove_sequence(seq_id)

    def check(self, world: World, seq_id: int, result: None) -> None:
        world.remove(seq_id)


class Clear(Operation):
    weight = 0.006

    def outcomes(self, world: World) -> set[str]:
        return {"done"}

    def draw(self, world: World) -> Any:
        return ()

    def apply(self, world: World, args: tuple) -> None:
        world.cache.clear()

    def check(self, world: World, args: tuple, result: None) -> None:
        for seq_id in [*world.ids, *world.importing]:
            world.remove(seq_id)
        assert world.cache.stats()["num_cached_pages"] == 0


def refusal_of_windows(world: World, seq_id: int, length: int) -> type[Exception] | None:
    """Return the error where a layer with a window no longer has positions that are needed."""
    text_length = world.text_length(seq_id, length)
    is_gone = any(kept.is_gone(seq_id, text_length) for kept in world.kept)
    return ValueError if is_gone and length else None


def may_be_gone(world: World, seq_id: int, length: int) -> bool:
    """Whether pages that a window would see may have been reclaimed."""
    text_length = world.text_length(seq_id, length)
    groups = zip(world.kept, world.num_reclaimed(), strict=True)
    return any(kept.may_be_gone(seq_id, text_length, number) for kept, number in groups)


def pick_to_go_back(world: World) -> int:
    """A sequence; where there are windows, often one that is much longer than these."""
    is_long = any(kept.window for kept in world.kept) and world.chance(0.4)
    return max(world.ids, key=world.length) if is_long else world.pick()


def outcomes_of_windows(world: World) -> set[str]:
    """A fork or pop further back than a window, with and without success."""
    return {"further back", "reclaimed"} if any(kept.window for kept in world.kept) else set()


def count_further_back(world: World, name: str, seq_id: int, text_length: int) -> None:
    if any(kept.missing(seq_id, text_length) for kept in world.kept):
        world.counts[f"{name}: further back"] += 1


class Fork(Operation):
    weight = 0.14

    def outcomes(self, world: World) -> set[str]:
        return {"done", "refused"} | outcomes_of_windows(world)

    def draw(self, world: World) -> Any:
        if not world.ids or (world.is_crowded and world.chance(0.9)):
            return None
        parent = pick_to_go_back(world)
        most = world.length(parent) if world.chance(0.1) else world.committed_length(parent)
        return parent, world.new_id(), int(world.rng.integers(-1, most + 1))

    def refusal(self, world: World, args: Any) -> type[Exception] | None:
        parent, _, position = args
        length = world.length(parent) if position == -1 else position
        if length > world.committed_length(parent):
            return ValueError
        return refusal_of_windows(world, parent, length)

    def may_be_gone(self, world: World, args: Any) -> bool:
        parent, _, position = args
        return may_be_gone(world, parent, world.length(parent) if position == -1 else position)

    def apply(self, world: World, args: Any) -> None:
        world.cache.fork_sequence(*args)

    def check(self, world: World, args: Any, result: None) -> None:
        parent, child, position = args
        length = world.length(parent) if position == -1 else position
        text_length = world.text_length(parent, length)
        count_further_back(world, "Fork", parent, text_length)
        for each in world.references:
            each.fork_sequence(*args)
        for kept in world.kept:
            kept.fork(parent, child, text_length)


class Pop(Operation):
    """Pop tree nodes, and committed positions before them."""

    weight = 0.06

    def outcomes(self, world: World) -> set[str]:
        return {"done"} | outcomes_of_windows(world)

    def draw(self, world: World) -> Any:
        if not world.ids:
            return None
        seq_id = pick_to_go_back(world)
        most = int(world.rng.integers(0, 8 if world.chance(0.6) else 80))
        return seq_id, min(int(world.rng.integers(0, world.length(seq_id) + 1)), most)

    def refusal(self, world: World, args: Any) -> type[Exception] | None:
        seq_id, _ = args
        return refusal_of_windows(world, seq_id, self.length_after(world, args))

    def may_be_gone(self, world: World, args: Any) -> bool:
        return may_be_gone(world, args[0], self.length_after(world, args))

    def length_after(self, world: World, args: Any) -> int:
        """Return the committed length after the pop."""
        seq_id, count = args
        return min(world.length(seq_id) - count, world.committed_length(seq_id))

    def apply(self, world: World, args: Any) -> None:
        world.cache.pop_n(*args)

    def check(self, world: World, args: Any, result: None) -> None:
        seq_id = args[0]
        text_length = world.text_length(seq_id, self.length_after(world, args))
        count_further_back(world, "Pop", seq_id, text_length)
        for each in world.references:
            each.pop_n(*args)
        for kept in world.kept:
            kept.pop(seq_id, text_length)


class EnableWindow(Operation):
    """A window for a sequence, unless it has one, or tree nodes, or a gap behind other sinks."""

    weight = 0.06

    def outcomes(self, world: World) -> set[str]:
        return {"done", "refused"} if world.has_windows else {"refused"}

    def draw(self, world: World) -> Any:
        if not world.ids or not (world.has_windows or world.chance(0.1)):
            return None
        seq_id = world.pick()
        size, window = int(world.rng.integers(1, 14)), world.window(seq_id)
        sinks = int(world.rng.integers(0, size))
        if window.dropped and world.chance(0.8):
            sinks = window.sinks
        if world.chance(0.1):
            size, sinks = (size, size) if world.chance(0.5) else (world.pick([0, -1, 2**31]), 0)
        return seq_id, size, sinks

    def refusal(self, world: World, args: Any) -> type[Exception] | None:
        seq_id, size, sinks = args
        window = world.window(seq_id)
        is_in_range = 0 <= sinks < size - world.mha.includes_self and size < 2**31
        fits = is_in_range and (window.dropped == 0 or sinks == window.sinks)
        is_free = window.size == 0 and not world.tree(seq_id)
        return None if world.has_windows and fits and is_free else ValueError

    def apply(self, world: World, args: Any) -> None:
        world.cache.enable_sliding_window(*args)

    def check(self, world: World, args: Any, result: None) -> None:
        world.mha.enable_window(*args)


class Overwrite(Operation):
    """debug_set_kv into a range that forks may share."""

    weight, needs_pages = 0.07, True

    def outcomes(self, world: World) -> set[str]:
        return {"done", "a kernel fails"}

    def draw(self, world: World) -> Any:
        if not world.ids:
            return None
        seq_id = world.pick()
        length = world.length(seq_id)
        if length == 0:
            return None
        first = min(world.first(seq_id), length)
        begin, end = first, length
        if world.chance(0.7):
            begin = int(world.rng.integers(first, length + 1))
            end = int(world.rng.integers(begin, length + 1))
        count = end - begin
        is_mla = world.pick([is_latent(layer) for layer in world.layers])
        if is_mla:
            rows = [world.normal(world.mla.num_layers, count, world.shapes.latent_dim)]
        else:
            rows = [
                world.normal(world.mha.num_layers, count, 1, world.shapes.dim) for _ in range(2)
            ]
        return seq_id, begin, rows, int(world.rng.integers(2)) if world.chance(0.5) else None

    def apply(self, world: World, args: Any) -> None:
        seq_id, begin, rows, fails_after = args
        write = world.cache.debug_set_kv_mla if len(rows) == 1 else world.cache.debug_set_kv
        with world.failing(fails_after):
            write(seq_id, begin, *rows)

    def check(self, world: World, args: Any, result: None) -> None:
        seq_id, begin, written, _ = args
        expected = world.mla if len(written) == 1 else world.mha
        written = [expected.kept(new, is_v=i == 1) for i, new in enumerate(written)]
        layers = expected.sequences[seq_id]
        for layer, held in enumerate(layers):
            rows = tuple(x.copy() for x in held)
            for row, new in zip(rows, written, strict=True):
                row[world.text_positions(seq_id, begin, begin + new.shape[1])] = new[layer]
            layers[layer] = rows


class Mistake(Operation):
    """A call that no cache may take."""

    weight = 0.10

    def outcomes(self, world: World) -> set[str]:
        return {"refused"}

    def draw(self, world: World) -> Any:
        calls = self.anywhere(world)
        if world.ids:
            calls += self.with_sequence(world, world.pick())
        if world.importing:
            calls += self.with_import(world, world.pick([*world.importing]))
        return calls[world.rng.integers(len(calls))]

    def anywhere(self, world: World) -> list:
        cache, ids = world.cache, world.ids
        batch = [*ids[: MAX_BATCH - 1], UNKNOWN]
        return [
            (KeyError, lambda: cache.remove_sequence(UNKNOWN)),
            (KeyError, lambda: cache.pop_n(UNKNOWN, 0)),
            (KeyError, lambda: cache.sequence_length(UNKNOWN)),
            (KeyError, lambda: cache.fork_sequence(UNKNOWN, NEW)),
            (KeyError, lambda: cache.begin_forward(batch, [1] * len(batch))),
            (KeyError, lambda: cache.commit_tree([*ids, UNKNOWN], [-1] * (len(ids) + 1))),
            (ValueError, lambda: cache.begin_forward([], [])),
            (ValueError, lambda: cache.end_forward()),
            (ValueError, lambda: cache.query_positions()),
            (ValueError, lambda: cache.commit_tree(ids, [-1] * (len(ids) + 1))),
        ]

    def with_sequence(self, world: World, some: int) -> list:
        cache, length = world.cache, world.length(some)
        return [
            (ValueError, lambda: cache.add_sequence(some)),
            (ValueError, lambda: cache.fork_sequence(some, some)),
            (ValueError, lambda: cache.fork_sequence(some, NEW, length + 1)),
            (ValueError, lambda: cache.fork_sequence(some, NEW, -2)),
            (ValueError, lambda: cache.pop_n(some, length + 1)),
            (ValueError, lambda: cache.pop_n(some, -1)),
            (ValueError, lambda: cache.begin_forward([some, some], [1, 1])),
            (ValueError, lambda: cache.begin_forward([some], [0])),
            (ValueError, lambda: cache.begin_forward([some], [CHUNK + 1])),
            (ValueError, lambda: cache.begin_forward([some], [1, 1])),
            (ValueError, lambda: cache.begin_forward([some], [1], [length + 1])),
            (ValueError, lambda: cache.attention(0, np.zeros((1, 4, world.shapes.dim), "f4"), 1.0)),
            (ValueError, lambda: self.read(world, some, length, length + 1)),
        ]

    def read(self, world: World, seq_id: int, begin: int, end: int) -> None:
        is_mla = is_latent(world.layers[0])
        read = world.cache.debug_get_kv_mla if is_mla else world.cache.debug_get_kv
        read(seq_id, begin, end)

    def with_import(self, world: World, some: int) -> list:
        cache = world.cache
        return [
            (ValueError, lambda: cache.add_sequence(some)),
            (ValueError, lambda: cache.pop_n(some, 0)),
            (ValueError, lambda: cache.sequence_length(some)),
            (ValueError, lambda: cache.fork_sequence(some, NEW)),
            (ValueError, lambda: cache.begin_forward([some], [1])),
            (ValueError, lambda: cache.commit_tree([some], [-1])),
            (ValueError, lambda: self.read(world, some, 0, 0)),
        ]

    def refusal(self, world: World, args: Any) -> type[Exception] | None:
        return args[0]

    def apply(self, world: World, args: Any) -> None:
        args[1]()
