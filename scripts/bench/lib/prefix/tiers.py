# SPDX-License-Identifier: Apache-2.0
"""Tiers below the pages of a cache, for the replay of workloads: what each of them gave and holds.

A store's bytes are counted where the cache calls it, so they are those that went over its
interface, with headers.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from tvm_pagedkv import PrefixCacheConfig
from tvm_pagedkv.cache import KVCache
from tvm_pagedkv.stores import DiskStore, MooncakeStore, PageStore, ValkeyStore

HOST, DISK, STORE = "host", "disk", "store"
# The cache's counters of reused tokens, and what is known of each tier here.
COUNTERS = {
    "pool": "reused_pool_tokens",
    HOST: "reused_host_tokens",
    "below": "reused_store_tokens",
}
WAIT_S = 10.0  # for a store, within a step
FLUSH_S = 600.0
MIB = 1 << 20


@dataclass(frozen=True)
class Tiers:
    """Tiers below the pages.

    Parameters
    ----------
    host_pages : int
        Pages of host memory.
    below : {"", "disk", "store"}
        What is below host memory: nothing, a folder, or a server.
    """

    host_pages: int
    below: str = ""


class CountedStore:
    """A store that knows what it holds and what was read.

    Parameters
    ----------
    store : PageStore

    Attributes
    ----------
    sizes : dict
        Bytes of each value that was put, by key.
    read_bytes : int
    """

    def __init__(self, store: PageStore):
        self.store, self.sizes, self.read_bytes = store, {}, 0
        self.exists, self.register, self.close = store.exists, store.register, store.close

    def get_into(
        self, keys: Sequence[bytes], addresses: Sequence[int], sizes: Sequence[int]
    ) -> list[bool]:
        """Read values, and count their bytes."""
        results = self.store.get_into(keys, addresses, sizes)
        self.read_bytes += sum(
            size for size, is_read in zip(sizes, results, strict=True) if is_read
        )
        return results

    def put_from(
        self, keys: Sequence[bytes], addresses: Sequence[int], sizes: Sequence[int]
    ) -> list[bool]:
        """Write values, and note their sizes."""
        results = self.store.put_from(keys, addresses, sizes)
        kept = zip(keys, sizes, results, strict=True)
        self.sizes |= {key: size for key, size, is_kept in kept if is_kept}
        return results


def store_opener(valkey: str | None, mooncake: str | None) -> Callable[[], PageStore] | None:
    """Return what opens the server of the command line, if there is one."""
    if valkey is not None:
        return lambda: ValkeyStore(valkey)
    if mooncake is not None:
        return lambda: MooncakeStore(mooncake)
    return None


class TierRun:
    """The tiers of one run: they begin empty.

    Parameters
    ----------
    tiers : Tiers
    page_bytes : int
        Of a page of all layers.
    num_pages : int
        Distinct pages of the workload.
    folder : Path
        An empty folder for the disk.
    open_store : callable, optional
        Opens the server.
    """

    def __init__(
        self,
        tiers: Tiers,
        page_bytes: int,
        num_pages: int,
        folder: Path,
        open_store: Callable[[], PageStore] | None = None,
    ):
        self.tiers, self.store = tiers, None
        if tiers.below == DISK:
            room = 4 * num_pages * (page_bytes + 4096) + 64 * MIB
            self.store = CountedStore(DiskStore(folder / "pages", max_bytes=room))
        elif tiers.below == STORE:
            assert open_store is not None
            self.store = CountedStore(open_store())
        self.config = PrefixCacheConfig(
            # A value has a header, and begins at a multiple of 4096 bytes.
            host_bytes=max(1, tiers.host_pages) * (-(-page_bytes // 4096) * 4096 + 4096),
            store=self.store,
            model_id=f"run {uuid.uuid4()}",  # a server may have pages of other runs
            lookup_timeout=WAIT_S,
        )

    def close(self, cache: KVCache, reused: dict[str, int], token_bytes: float) -> dict[str, dict]:
        """Write what is pending, close the store, and return the figures of each tier.

        Parameters
        ----------
        cache : KVCache
        reused : dict
            Tokens that requests have reused, by the names of `COUNTERS`.
        token_bytes : float
            Bytes of K and V of a token.

        Returns
        -------
        dict of dicts
            By tier, "pool", "host", "disk" and "store": ``reused_tokens``, ``reused_bytes``, and
            ``held_bytes`` at the end.
        """
        cache.flush_prefixes(FLUSH_S)
        stats = cache.stats()
        in_pool = sum(
            group["num_layers"]
            * group["page_bytes"]
            * (group["num_cached_pages"] + group["num_used_pages"])
            for group in stats["groups"]
        )
        held = {"pool": in_pool, HOST: stats["prefix_tiers"]["host_bytes"]}
        if self.store is not None:
            held[self.tiers.below] = sum(self.store.sizes.values())
        cache.close_prefixes(FLUSH_S)
        figures = {}
        for tier, held_bytes in held.items():
            num_tokens = reused[tier if tier in COUNTERS else "below"]
            figures[tier] = {
                "reused_tokens": num_tokens,
                "reused_bytes": num_tokens * token_bytes,
                "held_bytes": held_bytes,
            }
        return figures


def reused_tokens(cache: KVCache) -> dict[str, int] | None:
    """Return how many tokens the cache has reused so far, by tier; None without tiers."""
    counters = cache.stats().get("prefix_tiers")
    if counters is None:
        return None
    return {tier: counters[name] for tier, name in COUNTERS.items()}


def print_tiers(figures: dict[str, dict], num_tokens: int) -> None:
    """Print a line: the share of the prompts' tokens and the bytes that each tier gave."""
    parts = [
        f"{tier} {each['reused_tokens'] / num_tokens:.1%} {each['reused_bytes'] / 1e6:.1f} MB "
        f"(holds {each['held_bytes'] / 1e6:.1f} MB)"
        for tier, each in figures.items()
    ]
    print(f"{'':4}from {', '.join(parts)}", flush=True)
