# SPDX-License-Identifier: Apache-2.0
"""The operations of random worlds that send rows of a sequence to the other cache."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from tvm_pagedkv.transfer import _runtime
from tvm_pagedkv.transfer.layout import expand_runs, num_slots_of, regions

from .random_state import without_reclaiming
from .random_world import Operation, World

PEER, UNKNOWN = 3, 10**9


@dataclass
class Block:
    """A block that a sender keeps until it is released."""

    slots: list[np.ndarray]  # of each group of layers
    rows: list[np.ndarray]  # of each layer, as they were when the block was ready


def connect(pair: list[World]) -> None:
    """Let each of two worlds receive what the other one has."""
    for world, peer in (pair, pair[::-1]):
        world.peer = peer
        slots = num_slots_of(peer.cache)
        _runtime.set_send_handler(world.cache, PEER, world.announced.append, slots)


def slots_of(world: World, layer: int, slots: np.ndarray) -> tuple:
    """Index of some slots' rows in the pages of a layer."""
    page, slot = np.divmod(slots, world.page_size)
    return page, ..., slot, slice(None)


class Arguments(NamedTuple):
    seq_id: int
    source_id: int
    count: int
    fate: str  # of the receive: it is finished, cancelled, or its positions are popped
    fails_after: int | None


class Transfer(Operation):
    """Receives what a sequence of the other cache has beyond the length of one of this cache."""

    weight, needs_pages, gives_pages_back = 0.12, True, True

    def outcomes(self, world: World) -> set[str]:
        return {"done", "refused", "full"}

    def draw(self, world: World) -> Any:
        peer = world.peer
        ids = [i for i in world.ids if self.can_take_part(world, i) or world.chance(0.1)]
        if not ids:
            return None
        seq_id = min(ids, key=world.length) if world.chance(0.6) else world.pick(ids)
        begin = world.length(seq_id)
        sources = [i for i in peer.ids if self.can_take_part(peer, i) or world.chance(0.1)]
        sources = [i for i in sources if peer.length(i) > begin]
        if not sources:
            return None
        source_id = world.pick(sources)
        count = peer.length(source_id) - begin
        if world.chance(0.5):
            count = int(world.rng.integers(1, count + 1))
        fate = ["finish", "cancel", "pop"][int(world.rng.choice(3, p=[0.8, 0.1, 0.1]))]
        args = Arguments(seq_id, source_id, count, fate, None)
        if self.refusal(world, args) is None and world.chance(0.2):
            args = args._replace(fails_after=0)
        return args

    def can_take_part(self, world: World, seq_id: int) -> bool:
        return not world.tree(seq_id) and world.is_whole(seq_id)

    def refusal(self, world: World, args: Arguments) -> type[Exception] | None:
        seq_id, source_id, count, fate, _ = args
        if not self.can_take_part(world, seq_id):
            return ValueError
        if fate != "finish":
            return None
        begin, end = world.length(seq_id), world.length(seq_id) + count
        is_gone = any(
            max(begin, ours.first_after(seq_id, end)) < min(end, theirs.first[source_id])
            for ours, theirs in zip(world.kept, world.peer.kept, strict=True)
        )
        return ValueError if is_gone or not self.can_take_part(world.peer, source_id) else None

    def apply(self, world: World, args: Arguments) -> None:
        cache, peer, before = world.cache, world.peer, world.state()
        begin = world.length(args.seq_id)
        with world.failing(args.fails_after):
            slots = _runtime.prepare_recv(cache, args.seq_id, args.count)
        receive = _runtime.receive_id(cache, args.seq_id)
        if args.fate == "finish":
            peer_before = peer.state()
            try:
                _runtime.mark_send(peer.cache, args.source_id, begin, slots, PEER)
            except ValueError:
                assert peer.state() == peer_before
                _runtime.cancel_receive(cache, args.seq_id, receive)
                raise
            self.read(world, peer.announced.pop())
            _runtime.finish_receive(cache, args.seq_id, receive)
        elif args.fate == "cancel":
            _runtime.cancel_receive(cache, args.seq_id, receive)
        else:
            cache.pop_n(args.seq_id, args.count)
            _runtime.release_receives(cache, [receive])  # until then its pages stay taken
        peer.cache.check_integrity()
        if args.fate != "finish":
            assert without_reclaiming(world.state()) == without_reclaiming(before)

    def read(self, world: World, block_id: int) -> None:
        """Copy the rows of a block of the other cache, which keeps its pages for now."""
        peer = world.peer
        runs = _runtime.send_block(peer.cache, block_id)["runs"]
        block = Block([expand_runs(each[:, 0], each[:, 2]) for each in runs], [])
        for layer, group in enumerate(world.groups):
            block.rows.append(peer.pages(layer)[slots_of(peer, layer, block.slots[group])])
            about = world.cache.description["layers"][layer]
            rows = regions(about, world.page_size, runs[group])
            pages = (_runtime.pages_of(each.cache, layer) for each in (world, peer))
            _runtime.copy_regions(*pages, rows)
        peer.blocks[block_id] = block

    def check(self, world: World, args: Arguments, result: None) -> None:
        if args.fate != "finish":
            return
        begin = world.length(args.seq_id)
        end = begin + args.count
        for ours, theirs in zip(world.references, world.peer.references, strict=True):
            layers = ours.sequences[args.seq_id]
            for layer, rows in enumerate(theirs.sequences[args.source_id]):
                new, held = [x[begin:end] for x in rows], layers[layer]
                if held is not None:
                    new = [np.concatenate(both) for both in zip(held, new, strict=True)]
                layers[layer] = tuple(new)
        for kept, num_reclaimed in zip(world.kept, world.num_reclaimed(), strict=True):
            kept.receive(args.seq_id, begin, end, num_reclaimed)


class ReleaseBlock(Operation):
    """The receiver has read a block; what is in it has not changed, whatever has come since."""

    weight = 0.12

    def draw(self, world: World) -> Any:
        if not world.blocks or world.chance(0.05):
            return UNKNOWN if world.chance(0.1) else None
        return world.pick([*world.blocks])

    def refusal(self, world: World, block_id: int) -> type[Exception] | None:
        return None if block_id in world.blocks else KeyError

    def apply(self, world: World, block_id: int) -> None:
        if block_id in world.blocks:
            block = world.blocks[block_id]
            for layer, group in enumerate(world.groups):
                rows = world.pages(layer)[slots_of(world, layer, block.slots[group])]
                np.testing.assert_array_equal(rows, block.rows[layer])
        _runtime.release_send_block(world.cache, block_id)

    def check(self, world: World, block_id: int, result: None) -> None:
        del world.blocks[block_id]
