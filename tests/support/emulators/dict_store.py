# SPDX-License-Identifier: Apache-2.0
"""Stores of pages in a dictionary: one that works, one that fails, one that hangs."""

from __future__ import annotations

import ctypes
import threading

import numpy as np


class DictStore:
    """A store as `tvm_pagedkv.stores.PageStore` describes it; several caches may share `values`."""

    def __init__(self, values: dict[bytes, bytes] | None = None) -> None:
        self.values = {} if values is None else values
        self.calls: list[tuple[str, int]] = []
        self.registered: list[tuple[int, int]] = []
        self.closed = threading.Event()

    def _note(self, name: str, keys) -> None:
        assert not self.closed.is_set()
        assert all(isinstance(key, bytes) and len(key) == 32 for key in keys)
        self.calls.append((name, len(keys)))

    def exists(self, keys):
        self._note("exists", keys)
        return [key in self.values for key in keys]

    def get_into(self, keys, addresses, sizes):
        self._note("get", keys)
        results = []
        for key, address, size in zip(keys, addresses, sizes, strict=True):
            value = self.values.get(key)
            results.append(value is not None and len(value) == size)
            if results[-1]:
                ctypes.memmove(address, value, size)
        return results

    def put_from(self, keys, addresses, sizes):
        self._note("put", keys)
        for key, address, size in zip(keys, addresses, sizes, strict=True):
            self.values[key] = ctypes.string_at(address, size)
        return [True] * len(keys)

    def register(self, address, size):
        self.registered.append((address, size))

    def close(self):
        self.closed.set()


class FaultyStore(DictStore):
    """Fails, forgets, tears and swaps values, now and then."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.rng = np.random.default_rng(seed)

    def _maybe(self, chance: float) -> bool:
        return bool(self.rng.random() < chance)

    def _fail(self) -> None:
        if self._maybe(0.05):
            raise OSError("the disk is gone")

    def exists(self, keys):
        self._fail()
        found = super().exists(keys)
        return [not each if self._maybe(0.02) else each for each in found]

    def get_into(self, keys, addresses, sizes):
        self._fail()
        results = super().get_into(keys, addresses, sizes)
        for address, size in zip(addresses, sizes, strict=True):
            if self._maybe(0.05):  # torn
                half = size // 2
                ctypes.memset(address + half, int(self.rng.integers(256)), size - half)
            if self._maybe(0.05):  # a bit
                where = address + int(self.rng.integers(size))
                ctypes.memset(where, ctypes.string_at(where, 1)[0] ^ 4, 1)
        return results if not self._maybe(0.02) else [True] * len(keys)

    def put_from(self, keys, addresses, sizes):
        self._fail()
        super().put_from(keys, addresses, sizes)
        if self._maybe(0.1) and len(keys) > 1:  # values under wrong keys
            self.values[keys[0]], self.values[keys[1]] = self.values[keys[1]], self.values[keys[0]]
        if self._maybe(0.2):
            self.values.pop(next(iter(self.values)))
        return [True] * len(keys)


class HangingStore(DictStore):
    """Every call waits until `release` is set."""

    def __init__(self) -> None:
        super().__init__()
        self.release = threading.Event()
        self.entered = threading.Event()

    def exists(self, keys):
        self.entered.set()
        self.release.wait()
        return super().exists(keys)

    def put_from(self, keys, addresses, sizes):
        self.entered.set()
        self.release.wait()
        return super().put_from(keys, addresses, sizes)
