# SPDX-License-Identifier: Apache-2.0
"""`PrefixCacheConfig`: where pages of texts go when the pool has no room for them."""

from __future__ import annotations

import math
import numbers
import os
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from .._checks import check_choice, check_int

if TYPE_CHECKING:
    from ..stores import PageStore

WRITE_POLICIES = ("through", "back", "selective")
MAX_BYTES = 2**62
_STORE_METHODS = ("exists", "get_into", "put_from", "register", "close")


@dataclass(frozen=True)
class PrefixCacheConfig:
    """Tiers below the page pool: host memory, and a store outside the process.

    Parameters
    ----------
    host_bytes : int
        Host memory for pages. Each layer group gets slots for the same number of pages. 0: with a
        store, only what the copies to it need.
    disk_path : path, optional
        A folder for pages, opened as a `tvm_pagedkv.stores.DiskStore`. Not together with `store`.
    disk_bytes : int
        Maximum bytes that the folder may take.
    store : PageStore, optional
        An object with the methods of `tvm_pagedkv.stores.PageStore`. The cache closes it.
    model_id : str
        The name of the model and of what else decides K and V, such as a revision of the weights.
        Pages of other names are never used. Required with a store, which outlives the process.
    write_policy : {"through", "back", "selective"}, optional
        When a full page is copied to host memory, and from there to the store: as soon as it can be
        found, when the pool reclaims it, or when it has been found `min_hits` times. None:
        "through" with a store, else "back".
    min_hits : int
        For "selective".
    lookup_timeout : float
        Maximum seconds that `KVCache.add_sequence` waits for the answer of a store. 0: it
        does not ask; `KVCache.prefetch` does.

    Raises
    ------
    ValueError, TypeError
        If a value is not possible; the message names the field.
    """

    host_bytes: int = 0
    disk_path: str | os.PathLike | None = None
    disk_bytes: int = 16 << 30
    store: PageStore | None = None
    model_id: str = ""
    write_policy: str | None = None
    min_hits: int = 1
    lookup_timeout: float = 0.0

    def __post_init__(self) -> None:
        check_int("prefix_cache.host_bytes", self.host_bytes, 0, MAX_BYTES)
        check_int("prefix_cache.disk_bytes", self.disk_bytes, 1, MAX_BYTES)
        check_int("prefix_cache.min_hits", self.min_hits)
        if not isinstance(self.model_id, str):
            raise TypeError(f"prefix_cache.model_id must be a str, got {self.model_id!r}")
        if self.disk_path is not None and self.store is not None:
            raise ValueError("prefix_cache takes a disk_path or a store, not both")
        if self.disk_path is not None:
            os.fspath(self.disk_path)  # a TypeError for what is no path
        missing = [m for m in _STORE_METHODS if not callable(getattr(self.store, m, None))]
        if self.store is not None and missing:
            raise TypeError(
                f"prefix_cache.store must have the methods of tvm_pagedkv.stores.PageStore; "
                f"{type(self.store).__name__} lacks {', '.join(missing)}"
            )
        if not self.has_store and self.host_bytes == 0:
            raise ValueError("prefix_cache needs host_bytes, a disk_path or a store")
        if self.has_store and not self.model_id:
            raise ValueError(
                "prefix_cache.model_id must name the model: pages in a store outlive the process, "
                "and the cache cannot know from which weights they were computed"
            )
        if self.write_policy is not None:
            check_choice("prefix_cache.write_policy", self.write_policy, WRITE_POLICIES)
        seconds = _check_seconds("prefix_cache.lookup_timeout", self.lookup_timeout)
        object.__setattr__(self, "lookup_timeout", seconds)

    @property
    def has_store(self) -> bool:
        """Whether there is a tier below host memory."""
        return self.store is not None or self.disk_path is not None

    @property
    def resolved_write_policy(self) -> str:
        """The policy of the cache: `write_policy`, or its default."""
        return self.write_policy or ("through" if self.has_store else "back")


def _check_seconds(name: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise TypeError(f"{name} must be a number of seconds, got {value!r}")
    seconds = float(value)
    if not (math.isfinite(seconds) and 0 <= seconds <= 3600):
        raise ValueError(f"{name} must be between 0 and 3600 seconds, got {value}")
    return seconds
