# SPDX-License-Identifier: Apache-2.0
"""Rows from the cache of one engine to that of another, in one process."""

from __future__ import annotations

import numpy as np

from tvm_pagedkv import KVCache
from tvm_pagedkv.cache import page_groups
from tvm_pagedkv.transfer import _runtime

from .engine import PAGE_SIZE


def connect(source: KVCache, destination: KVCache, number: int) -> list[int]:
    """Copy rows that steps of `source` make ready; `number` names the destination.

    Returns
    -------
    list of int
        The rows of each copy so far.
    """
    sent: list[int] = []
    layers = range(len(page_groups(source)))
    pools = [
        [np.from_dlpack(_runtime.pages_of(c, i)) for i in layers] for c in (source, destination)
    ]

    def put(block: int) -> None:
        (runs,) = _runtime.send_block(source, block)["runs"]  # of the one layer group
        for first, its_first, length in runs:
            slots, its_slots = (
                np.arange(first, first + length),
                np.arange(its_first, its_first + length),
            )
            for pages, its_pages in zip(*pools, strict=True):
                rows = pages[slots // PAGE_SIZE, :, :, slots % PAGE_SIZE]
                its_pages[its_slots // PAGE_SIZE, :, :, its_slots % PAGE_SIZE] = rows
            sent.append(int(length))
        _runtime.release_send_block(source, block)

    num_slots = len(pools[1][0]) * PAGE_SIZE
    _runtime.set_send_handler(source, number, put, [num_slots])
    return sent
