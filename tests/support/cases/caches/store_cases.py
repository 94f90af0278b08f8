# SPDX-License-Identifier: Apache-2.0
"""Values for tests of stores, in memory of their own with guard bytes around each value."""

from __future__ import annotations

import hashlib
import mmap
from collections.abc import Iterable

import numpy as np

GUARD = 0xA5
PAGE = 4096


def key_of(name: object) -> bytes:
    return hashlib.sha256(str(name).encode()).digest()


def value_of(key: bytes, size: int) -> np.ndarray:
    """The value of a key: every reader can tell what the right bytes are."""
    seed = int.from_bytes(key[:8], "little")
    return np.frombuffer(np.random.default_rng(seed).bytes(size), np.uint8)


class Values:
    """Memory for some values, with guard bytes between them.

    Parameters
    ----------
    sizes : iterable of int
    shift : int
        Offset of each value from a multiple of 4096.
    """

    def __init__(self, sizes: Iterable[int], shift: int = 0):
        self.sizes = list(sizes)
        self.starts, end = [], PAGE
        for size in self.sizes:
            self.starts.append(end + shift)
            end += -(-(size + shift + 1) // PAGE) * PAGE
        self.memory = np.frombuffer(mmap.mmap(-1, end), np.uint8)
        self.memory[...] = GUARD
        self.addresses = [self.memory.ctypes.data + start for start in self.starts]

    def __getitem__(self, index: int) -> np.ndarray:
        return self.memory[self.starts[index] : self.starts[index] + self.sizes[index]]

    def guards_are_whole(self) -> bool:
        outside = np.ones(len(self.memory), bool)
        for start, size in zip(self.starts, self.sizes, strict=True):
            outside[start : start + size] = False
        return bool((self.memory[outside] == GUARD).all())


def put(store, keys: list[bytes], sizes: list[int], shift: int = 0) -> list[bool]:
    """Put the values of keys."""
    values = Values(sizes, shift)
    for i, key in enumerate(keys):
        values[i][...] = value_of(key, sizes[i])
    return store.put_from(keys, values.addresses, values.sizes)


def get(store, keys: list[bytes], sizes: list[int], shift: int = 0) -> list[bool]:
    """Get values, and prove that each hit is right and that nothing else was written."""
    values = Values(sizes, shift)
    hits = store.get_into(keys, values.addresses, values.sizes)
    assert len(hits) == len(keys) and all(type(hit) is bool for hit in hits)
    for i, key in enumerate(keys):
        if hits[i]:
            np.testing.assert_array_equal(values[i], value_of(key, sizes[i]))
    assert values.guards_are_whole()
    return hits
