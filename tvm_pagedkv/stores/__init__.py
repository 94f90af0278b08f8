# SPDX-License-Identifier: Apache-2.0
"""Stores: where pages of prefixes are kept outside the process, by a key of 32 bytes.

`DiskStore` keeps them in a folder, `ValkeyStore` in a Valkey or Redis server, and `MooncakeStore`
in the memory of many machines. `GuardedStore` adds deadlines and a circuit breaker to a store, and
`TieredStore` makes one of several. A `StoreWorker` moves values between a cache's host tier and its
store.
"""

from .disk import DiskStore
from .guard import GuardedStore
from .interface import PageStore
from .mooncake import MooncakeStore
from .opening import open_disk_store
from .tiered import TieredStore
from .valkey import ValkeyStore
from .worker import HostMemory, StoreWorker, close_worker

__all__ = [
    "DiskStore",
    "GuardedStore",
    "MooncakeStore",
    "PageStore",
    "HostMemory",
    "StoreWorker",
    "TieredStore",
    "ValkeyStore",
    "close_worker",
    "open_disk_store",
]
