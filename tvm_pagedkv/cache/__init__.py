# SPDX-License-Identifier: Apache-2.0
"""The cache: the runtime object with keyword methods, checkpoints and page maps.

Nothing here needs a compiler.
"""

from .kv_cache import KVCache
from .page_format import page_groups
from .page_map import PageMap
from .stats import CacheStats, GroupStats, PrefixTierStats
from .tiers import open_prefix_cache

__all__ = [
    "CacheStats",
    "GroupStats",
    "KVCache",
    "PageMap",
    "PrefixTierStats",
    "open_prefix_cache",
    "page_groups",
]
