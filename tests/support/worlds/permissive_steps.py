# SPDX-License-Identifier: Apache-2.0
"""Steps that leave layers out, as the global functions allow and `KVCache.forward` does not."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import tvm_pagedkv as pkv


@contextmanager
def permissive_step(cache: pkv.KVCache, *arguments) -> Iterator[pkv.KVCache]:
    """`begin_forward` and `end_forward`, whatever happens between them."""
    cache.begin_forward(*arguments)
    try:
        yield cache
    finally:
        cache.end_forward()
