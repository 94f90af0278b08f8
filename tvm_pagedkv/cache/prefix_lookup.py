# SPDX-License-Identifier: Apache-2.0
"""Lookup of the tier of each page of a text, by its tokens."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import tvm_ffi

from .._functions import global_function
from .inspection import CacheInspection

_TIERS = ("", "pool", "host", "store")  # as pagedkv.prefix_locate numbers them


def as_tokens(tokens: Sequence[int]) -> tvm_ffi.Tensor:
    """Return token ids as a vector; raise a TypeError if they are not integers."""
    array = np.asarray(tokens)
    if array.size == 0:
        array = np.empty(0, "int32")
    if array.ndim != 1 or array.dtype.kind not in "iu":
        raise TypeError(f"tokens must be integers in one dimension, got {tokens!r:.80}")
    # DLPack exports no read-only array; a copy of 8192 numbers takes some microseconds.
    return tvm_ffi.from_dlpack(array.astype("int32" if array.dtype == "int32" else "int64"))


def as_salt(salt: bytes) -> bytes:
    """Return the salt; raise a TypeError if it is not bytes."""
    if not isinstance(salt, bytes):
        raise TypeError(f"salt must be bytes, got {salt!r}")
    return salt


def locate_prefix(
    cache: CacheInspection, tokens: Sequence[int], salt: bytes = b"", timeout: float = 1.0
) -> list[tuple[str, ...]]:
    """`KVCache.locate_prefix`."""
    ids = as_tokens(tokens)
    found = global_function("pagedkv.prefix_locate")(cache, ids, as_salt(salt), float(timeout))
    names = [_TIERS[int(place)] for place in found]
    num_pages = ids.shape[0] // cache.description["page_size"]
    num_groups = len(cache.stats()["groups"])
    return [tuple(names[i * num_groups : (i + 1) * num_groups]) for i in range(num_pages)]
