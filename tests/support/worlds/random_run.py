# SPDX-License-Identifier: Apache-2.0
"""Runs random worlds, and compares all that a cache says and holds with its reference."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import numpy as np

from ..emulators.python_kernels import poison, shuffle
from .random_shapes import is_latent
from .random_transfers import Block
from .random_world import CHUNK, MAX_BATCH, Operation, World

RARE = 4


def run(
    worlds: Sequence[World],
    operations: Sequence[Operation],
    num_steps: int,
    wanted: Collection[str] = (),
) -> None:
    """Apply operations to worlds at random, and look at everything now and then.

    Operations that have an outcome in `wanted` are drawn `RARE` times as often.
    """
    rng = worlds[0].rng
    rare = {outcome.split(":")[0] for outcome in wanted}
    weights = np.array([x.weight * (RARE if type(x).__name__ in rare else 1) for x in operations])
    step = 0
    while step < num_steps:
        operation = operations[rng.choice(len(operations), p=weights / weights.sum())]
        world = worlds[rng.integers(len(worlds))]
        try:
            if not world.do(operation):
                continue
            world.cache.check_integrity()
            if step % 5 == 0:
                shuffle(world.cache, step)
                poison(world.cache)
            if step % 10 == 0:
                check_counters(world)
                check_rows(world)
        except Exception as error:
            error.add_note(f"step {step}: {type(operation).__name__}")
            raise
        step += 1


def run_until_all_happened(
    pairs: Sequence[Sequence[World]], operations: Sequence[Operation], max_steps: int
) -> None:
    """Go on until the run has seen all that it must see: what is rare takes its time."""
    worlds, steps_at_once = [world for pair in pairs for world in pair], 50
    for i in range(max_steps // steps_at_once):
        missing = never_seen(worlds, operations)
        if not missing:
            return
        run(pairs[i % len(pairs)], operations, steps_at_once, missing)
    missing = never_seen(worlds, operations)
    assert not missing, f"after {max_steps} more steps still never seen: {sorted(missing)}"


def never_seen(worlds: Sequence[World], operations: Sequence[Operation]) -> set[str]:
    """Return outcomes of operations, kernel failures and counters that have not occurred yet."""
    wanted = {"a mistake in a step", "moved_tree_nodes", "cow_page_copies"}
    for operation in operations:
        outcomes = operation.outcomes(worlds[0])
        wanted |= {f"{type(operation).__name__}: {outcome}" for outcome in outcomes}
    wanted |= {f"{kernel} fails" for world in worlds for kernel in world.called}
    shared = {"pages shared in a step"}
    wanted |= set() if all(kept.window for kept in worlds[0].kept) else shared
    seen = set()
    for world in worlds:
        stats = world.cache.stats()
        seen |= {*world.counts, *world.failures, *(key for key in stats if stats[key])}
        seen |= shared if stats["pages_read"] < stats["pages_read_without_sharing"] else set()
    return wanted - seen


def check_counters(world: World) -> None:
    """Lengths, page tables and statistics."""
    lengths = {seq_id: world.length(seq_id) for seq_id in world.ids}
    stats = world.cache.stats()
    if all(kept.window for kept in world.kept):  # layers with a window share no pages in a step
        assert stats["pages_read"] == stats["pages_read_without_sharing"]
    assert {i: world.cache.sequence_length(i) for i in world.ids} == lengths
    assert world.cache.sequence_ids() == sorted(world.ids)
    assert stats["uncommitted_tree_nodes"] == sum(len(world.tree(i)) for i in world.ids)
    assert stats["num_importing_sequences"] == len(world.importing)
    windows = {i: world.window(i) for i in world.ids}
    for seq_id, window in windows.items():
        expected = window.size, window.sinks, window.dropped
        assert tuple(world.cache.sequence_window(seq_id)) == expected
    assert stats["num_windowed_sequences"] == sum(x.size > 0 for x in windows.values())
    assert stats["num_dropped_tokens"] == sum(x.dropped for x in windows.values())
    lengths |= {i: checkpoint.length for i, checkpoint in world.importing.items()}
    assert world.cache.total_length() == stats["total_tokens"] == sum(lengths.values())
    assert stats["num_sequences"] == len(lengths)
    assert world.cache.is_empty == (not lengths)
    groups = range(len(world.kept))
    pins = [len(pages_of(world, block, g)) for block in world.blocks.values() for g in groups]
    assert stats["num_pinned_pages"] == sum(pins)
    assert stats["num_send_blocks"] == len(world.blocks)
    free: list[int] = []
    has_global = any(kept.window == 0 for kept in world.kept)
    for g, tables in enumerate(world.tables()):
        kept, group = world.kept[g], stats["groups"][g]
        for seq_id, table in tables.items():
            if seq_id in world.importing:
                assert len(table) == kept.num_pages(seq_id, lengths[seq_id])
                continue
            assert world.cache.first_position(seq_id, g) == world.first_position(seq_id, g)
            assert len(table) == len(set(world.kept_text(seq_id, g) // world.page_size))
        assert group["window"] == abs(kept.window)
        used = {page for table in tables.values() for page in table}
        used |= {page for block in world.blocks.values() for page in pages_of(world, block, g)}
        assert group["num_used_pages"] == len(used)
        num_available = group["num_free_pages"] + group["num_cached_pages"]
        assert num_available == group["num_pages"] - len(used)
        assert len(world.cache.cached_pages(g)) == group["num_cached_pages"]
        assert group["num_pages"] <= -(-world.max_total_tokens // world.page_size)
        # A layer with a window counts where it may lack pages for a step that others can serve.
        needed = (CHUNK - MAX_BATCH) // world.page_size + MAX_BATCH + group["num_shared_pages"]
        has_enough = kept.window and num_available >= needed
        if world.has_windows or not has_enough or not has_global:
            free.append(num_available)
    assert world.cache.num_available_pages() == min(free)


def pages_of(world: World, block: Block, group: int) -> set[int]:
    """Return the pages that a block keeps while it is sent."""
    return {*(block.slots[group] // world.page_size).tolist()}


def check_rows(world: World) -> None:
    """All rows of all sequences, in the pages' memory; those of one sequence by its readers."""
    for seq_id in world.ids:
        for layer, group in enumerate(world.groups):
            text = world.kept_text(seq_id, group)
            table = np.array(world.cache.page_table(seq_id, group), int)
            page_numbers, index = np.unique(text // world.page_size, return_inverse=True)
            assert len(page_numbers) == len(table)
            slots = table[index] * world.page_size + text % world.page_size
            for got, want in zip(_rows_of(world, layer), world.rows(seq_id, layer), strict=True):
                np.testing.assert_array_equal(got[slots], want[text])
    if world.ids:
        check_readers(world, world.pick())


def _rows_of(world: World, layer: int) -> list[np.ndarray]:
    """All slots of a layer's pages."""
    pages = world.pages(layer)
    if is_latent(world.layers[layer]):
        return [pages.reshape(-1, world.shapes.latent_dim)]
    return [pages[:, plane].swapaxes(1, 2).reshape(-1, 1, world.shapes.dim) for plane in range(2)]


def check_readers(world: World, seq_id: int) -> None:
    """debug_get_kv of a sequence, and of what layers of a kind no longer have."""
    length = world.length(seq_id)
    for is_mla in set(map(is_latent, world.layers)):
        read = world.cache.debug_get_kv_mla if is_mla else world.cache.debug_get_kv
        layers = [i for i, each in enumerate(world.layers) if is_latent(each) == is_mla]
        begin = max(world.first_position(seq_id, world.groups[layer]) for layer in layers)
        actual = read(seq_id, begin)
        actual = [x.numpy() for x in (actual if isinstance(actual, tuple) else [actual])]
        text = world.text_positions(seq_id, begin, length)
        for layer in layers:
            for got, want in zip(actual, world.rows(seq_id, layer), strict=True):
                np.testing.assert_array_equal(got[world.local(layer)], want[text])
        if 0 < begin < length:
            try:
                read(seq_id, begin - 1)
            except IndexError as error:
                assert f"position {begin - 1} of sequence" in str(error)
            else:
                raise AssertionError("what is gone was read")
