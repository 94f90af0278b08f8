# SPDX-License-Identifier: Apache-2.0
"""The bytes that malloc has handed out: memory that leaks counts, free memory that it keeps not."""

from __future__ import annotations

import ctypes
import gc

import pytest

_FIELDS = "arena ordblks smblks hblks hblkhd usmblks fsmblks uordblks fordblks keepcost".split()


class _Mallinfo2(ctypes.Structure):
    _fields_ = [(name, ctypes.c_size_t) for name in _FIELDS]


def bytes_in_use() -> int:
    """Return the bytes in use, of all arenas; skip the test where the C library does not tell."""
    try:
        mallinfo2 = ctypes.CDLL(None).mallinfo2
    except AttributeError:  # glibc before 2.33, or another library
        pytest.skip("this C library has no mallinfo2")
    mallinfo2.restype = _Mallinfo2
    gc.collect()
    info = mallinfo2()
    return info.uordblks + info.hblkhd
