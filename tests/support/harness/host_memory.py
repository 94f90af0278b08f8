# SPDX-License-Identifier: Apache-2.0
"""Damage of the host memory below a cache."""

from __future__ import annotations

import ctypes
import re

import tvm_ffi


def flip_bit_of(cache, row: bytes) -> None:
    """Flip a bit of each copy of a row in the host memory below a cache."""
    tier = tvm_ffi.get_global_func("pagedkv.prefix_tier")(cache)
    address, size = map(int, tvm_ffi.get_global_func("pagedkv.tier_memory")(tier))
    copies = list(re.finditer(re.escape(row), ctypes.string_at(address, size)))
    assert copies
    for copy in copies:
        ctypes.memset(address + copy.start(), row[0] ^ 1, 1)
