# SPDX-License-Identifier: Apache-2.0
"""Views of host memory that the caller gives as addresses, and checks of such arguments."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

KEY_BYTES = 32

_WRITABLE = 0x200  # PyBUF_WRITE
_from_memory = ctypes.pythonapi.PyMemoryView_FromMemory
_from_memory.argtypes = (ctypes.c_void_p, ctypes.c_ssize_t, ctypes.c_int)
_from_memory.restype = ctypes.py_object


def view(address: int, size: int) -> memoryview:
    """Return a writable view of memory. The view does not keep the memory alive."""
    return _from_memory(address, size, _WRITABLE)


def check_keys(keys: Sequence[bytes]) -> None:
    """Raise if a key is not 32 bytes long."""
    for key in keys:
        if not isinstance(key, bytes):
            raise TypeError(f"a key must be bytes, got {type(key).__name__}")
        if len(key) != KEY_BYTES:
            raise ValueError(f"a key must have {KEY_BYTES} bytes, got {len(key)}")


def check_batch(keys: Sequence[bytes], addresses: Sequence[int], sizes: Sequence[int]) -> None:
    """Raise unless there is a valid key, address and size for each value."""
    check_keys(keys)
    if not len(keys) == len(addresses) == len(sizes):
        raise ValueError(
            "keys, addresses and sizes must be equally long, got "
            f"{len(keys)}, {len(addresses)} and {len(sizes)}"
        )
    for address, size in zip(addresses, sizes, strict=True):
        if address <= 0:
            raise ValueError(f"an address must be positive, got {address}")
        if size <= 0:
            raise ValueError(f"a size must be positive, got {size}")
