# SPDX-License-Identifier: Apache-2.0
"""Open the tiers below the pages of a cache."""

from __future__ import annotations

from typing import TYPE_CHECKING

from .._functions import global_function
from ..config import PrefixCacheConfig
from ..stores import HostMemory, StoreWorker, open_disk_store
from .inspection import CacheInspection

if TYPE_CHECKING:
    from ..stores import PageStore


def open_prefix_cache(cache: CacheInspection, config: PrefixCacheConfig) -> None:
    """Keep the pages of texts in tiers below the pages of a cache.

    `tvm_pagedkv.create` does this for a `KVCacheConfig` with ``prefix_cache``; call it for caches
    that were made otherwise, such as by a Relax VM, before any tokens are recorded.

    Parameters
    ----------
    cache : KVCache
    config : PrefixCacheConfig
        Its store belongs to the cache from now on.

    Raises
    ------
    ValueError
        If the cache has tiers or recorded tokens, or if `host_bytes` holds no page.
    MemoryError
        If the machine has too little memory.
    OSError
        If the folder cannot be opened.
    """
    options = {
        "host_bytes": config.host_bytes,
        "model_id": config.model_id,
        "write_policy": config.resolved_write_policy,
        "min_hits": config.min_hits,
        "lookup_timeout": config.lookup_timeout,
        "has_store": config.has_store,
    }
    store = _open_store(config)  # first: what fails leaves the cache as it is
    try:
        tier = global_function("pagedkv.prefix_open")(cache, options)
    except BaseException:
        if store is not None and store is not config.store:
            store.close()
        raise
    if store is not None:
        StoreWorker(tier, store)


def _open_store(config: PrefixCacheConfig) -> PageStore | None:
    if config.disk_path is None:
        return config.store
    return open_disk_store(config.disk_path, config.disk_bytes)


def tier_of(cache: object) -> HostMemory | None:
    """Return the tier below the pages of a cache, if there is one."""
    return global_function("pagedkv.prefix_tier")(cache)
