# SPDX-License-Identifier: Apache-2.0
"""Snapshots of what a failed call must leave alone in a random world's cache."""

from __future__ import annotations

import zlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .random_world import World


def state_of(world: World) -> tuple:
    """Counters, lengths, page tables, cached pages, and the bytes of all pages in use."""
    cache, tables = world.cache, world.tables()
    first = [{i: cache.first_position(i, g) for i in t} for g, t in enumerate(tables)]
    used = [sorted({page for table in t.values() for page in table}) for t in tables]
    memory = [
        zlib.crc32(world.pages(layer)[used[group]].tobytes())
        for layer, group in enumerate(world.groups if world.can_stop else [])
    ]
    lengths = {
        i: (cache.sequence_length(i), cache.sequence_window(i)) for i in cache.sequence_ids()
    }
    stats = {**cache.stats(), "cow_page_copies": 0}  # counts those that were given back as well
    stats["cached_pages"] = [cache.cached_pages(g) for g in range(len(tables))]
    if world.device is not None:  # arrays that a call has made remain
        stats = {name: stats[name] for name in stats if "bytes" not in name}
    return stats, cache.is_in_forward, lengths, tables, first, memory


def without_reclaiming(state: tuple) -> tuple:
    """Return what does not change where a call has written to pages that it then gave back.

    Those that it had reclaimed are free then.
    """
    stats, *others = state
    stats = {name: stats[name] for name in stats if name != "cached_pages"}
    stats["groups"] = [dict(group) for group in stats["groups"]]
    for each in (stats, *stats["groups"]):
        each["num_free_pages"] += each.pop("num_cached_pages")
        del each["num_reclaimed_pages"]
    return stats, *others
