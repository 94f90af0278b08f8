# SPDX-License-Identifier: Apache-2.0
"""A store in a dict, for tests of what surrounds stores."""

from __future__ import annotations

import ctypes
import threading


class MemoryStore:
    """Values in a dict.

    Attributes
    ----------
    values : dict
        Key to value.
    registered : list of (address, size)
    closed : threading.Event
    """

    def __init__(self):
        self.values: dict[bytes, bytes] = {}
        self.registered: list[tuple[int, int]] = []
        self.closed = threading.Event()

    @property
    def is_closed(self) -> bool:
        return self.closed.is_set()

    def exists(self, keys):
        return [key in self.values for key in keys]

    def get_into(self, keys, addresses, sizes):
        results = []
        for key, address, size in zip(keys, addresses, sizes, strict=True):
            value = self.values.get(key)
            is_there = value is not None and len(value) == size
            if is_there:
                ctypes.memmove(address, value, size)
            results.append(is_there)
        return results

    def put_from(self, keys, addresses, sizes):
        for key, address, size in zip(keys, addresses, sizes, strict=True):
            self.values[key] = ctypes.string_at(address, size)
        return [True] * len(keys)

    def register(self, address, size):
        self.registered.append((address, size))

    def close(self):
        self.closed.set()
