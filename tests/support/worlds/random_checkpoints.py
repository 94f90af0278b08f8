# SPDX-License-Identifier: Apache-2.0
"""The operations of random worlds that carry sequences from one cache to another."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import tvm

from ...reference.checkpoint import page_group
from ..cases.caches.checkpoint_cases import call, export
from .random_world import Operation, World

UNKNOWN = 10**9


@dataclass(eq=False)
class Checkpoint:
    """An exported checkpoint, with the rows that the references held."""

    metadata: str
    page_groups: list[tvm.runtime.Tensor]
    length: int
    first: list[int]  # of each group of layers
    rows: list[list]  # of each reference
    arrived: set[int] = field(default_factory=set)

    @property
    def missing(self) -> set[int]:
        """Layers whose pages have not been imported."""
        return {i for i, each in enumerate(self.page_groups) if each.shape[1]} - self.arrived


class Export(Operation):
    """Puts a checkpoint onto the shelf; with tree nodes or a window there is none."""

    weight = 0.05

    def draw(self, world: World) -> Any:
        ids = [i for i in world.ids if self.is_possible(world, i) or world.chance(0.1)]
        return world.pick(ids) if ids else None

    def is_possible(self, world: World, seq_id: int) -> bool:
        return not world.tree(seq_id) and world.is_whole(seq_id)

    def refusal(self, world: World, seq_id: int) -> type[Exception] | None:
        return None if self.is_possible(world, seq_id) else ValueError

    def apply(self, world: World, seq_id: int) -> Any:
        return export(world.cache, seq_id)

    def check(self, world: World, seq_id: int, result: Any) -> None:
        metadata, page_groups = result
        first = [kept.first[seq_id] for kept in world.kept]
        for layer, group in enumerate(world.groups):
            num_gone = first[group] // world.page_size
            want = page_group(world.rows(seq_id, layer), num_gone, world.page_size)
            actual = world.numbers(layer, page_groups[layer].numpy()[0])[None]
            np.testing.assert_array_equal(actual, want)
        rows = [list(each.sequences[seq_id]) for each in world.references]
        world.shelf.append(Checkpoint(metadata, page_groups, world.length(seq_id), first, rows))
        longest = max(world.shelf, key=lambda each: each.length)  # stays: it may need too much
        del world.shelf[:-4]
        world.shelf.extend([] if longest in world.shelf else [longest])


class BeginImport(Operation):
    """Takes the pages of a checkpoint; also for a sequence that is there and empty."""

    weight, needs_pages = 0.05, True

    def outcomes(self, world: World) -> set[str]:
        return {"done", "refused", "full"}

    def draw(self, world: World) -> Any:
        if not world.shelf or (world.is_crowded and world.chance(0.9)):
            return None
        checkpoint = world.shelf[world.rng.integers(len(world.shelf))]
        if world.chance(0.5):
            checkpoint = max(world.shelf, key=lambda each: each.length)
        seq_id = world.pick() if world.ids and world.chance(0.2) else world.new_id()
        metadata = checkpoint.metadata
        if world.chance(0.1):  # cut off, or of other layers
            metadata = metadata[:-1] if world.chance(0.5) else metadata.replace("float32", "int8")
        copy = Checkpoint(
            metadata, checkpoint.page_groups, checkpoint.length, checkpoint.first, checkpoint.rows
        )
        return seq_id, copy, metadata != checkpoint.metadata

    def refusal(self, world: World, args: Any) -> type[Exception] | None:
        seq_id, _, is_bad = args
        is_there = seq_id in world.ids
        if is_there:
            is_bad = is_bad or world.length(seq_id) > 0 or not world.is_whole(seq_id)
        return ValueError if is_bad else None

    def apply(self, world: World, args: Any) -> None:
        seq_id, checkpoint, _ = args
        call("prepare_import", world.cache, seq_id, checkpoint.metadata)

    def check(self, world: World, args: Any, result: None) -> None:
        seq_id, checkpoint, _ = args
        if seq_id in world.ids:
            world.remove(seq_id)
        world.importing[seq_id] = checkpoint
        for kept, first in zip(world.kept, checkpoint.first, strict=True):
            kept.begin(seq_id, first)


class ImportPages(Operation):
    """Brings the pages of one layer; not twice, and not the wrong ones."""

    weight = 0.22

    def draw(self, world: World) -> Any:
        if not world.importing:
            return None
        seq_id = world.pick([*world.importing])
        checkpoint = world.importing[seq_id]
        layer = int(world.rng.integers(len(world.layers)))
        if checkpoint.missing and world.chance(0.8):
            layer = world.pick(sorted(checkpoint.missing))
        data = checkpoint.page_groups[layer].numpy()
        if world.chance(0.1):
            data = np.concatenate([data, np.zeros_like(data, shape=(1, 1, *data.shape[2:]))], 1)
        return seq_id, layer, tvm.runtime.tensor(data)

    def refusal(self, world: World, args: Any) -> type[Exception] | None:
        seq_id, layer, data = args
        checkpoint = world.importing[seq_id]
        is_bad = tuple(data.shape) != tuple(checkpoint.page_groups[layer].shape)
        return ValueError if is_bad or layer in checkpoint.arrived else None

    def apply(self, world: World, args: Any) -> None:
        seq_id, layer, data = args
        call("import_page_group", world.cache, seq_id, layer, data)

    def check(self, world: World, args: Any, result: None) -> None:
        seq_id, layer, _ = args
        checkpoint = world.importing[seq_id]
        checkpoint.arrived |= {layer} & checkpoint.missing


class FinishImport(Operation):
    """Makes an import a sequence like any other, once all is there."""

    weight = 0.05

    def draw(self, world: World) -> Any:
        if not world.importing:
            return UNKNOWN if world.chance(0.1) else None
        if world.ids and world.chance(0.05):
            return world.pick()
        whole = [i for i, each in world.importing.items() if not each.missing]
        return world.pick(whole if whole and world.chance(0.8) else [*world.importing])

    def refusal(self, world: World, seq_id: int) -> type[Exception] | None:
        if seq_id == UNKNOWN:
            return KeyError
        is_whole = seq_id in world.importing and not world.importing[seq_id].missing
        return None if is_whole else ValueError

    def apply(self, world: World, seq_id: int) -> None:
        call("finish_import", world.cache, seq_id)

    def check(self, world: World, seq_id: int, result: None) -> None:
        checkpoint = world.importing.pop(seq_id)
        for each, rows in zip(world.references, checkpoint.rows, strict=True):
            each.add_sequence(seq_id)
            each.sequences[seq_id] = list(rows)
