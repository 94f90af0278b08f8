# SPDX-License-Identifier: Apache-2.0
"""The global functions of transfers, with Python types."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
import tvm
import tvm_ffi

from .._functions import global_function
from ..cache import KVCache


def prepare_recv(cache: KVCache, seq_id: int, length: int) -> list[int]:
    """Take pages for `length` more positions; the map of their slots."""
    return list(global_function("vm.builtin.kv_cache_disagg_prepare_recv")(cache, seq_id, length))


def mark_send(cache: KVCache, seq_id: int, begin: int, slots: Sequence[int], peer: int) -> None:
    """Send the positions from `begin` on to the slots of a receiver as they are computed.

    `peer` is the number under which the receiver was connected.
    """
    mark = global_function("vm.builtin.kv_cache_disagg_mark_send")
    mark(cache, seq_id, begin, tvm_ffi.Shape(tuple(slots)), peer)


def receive_id(cache: KVCache, seq_id: int) -> int:
    """Which receive of the sequence is under way; 0: none.

    From now on its pages stay taken until the receive is finished, cancelled or released, even if
    the sequence is removed: its transport may still write to them.
    """
    return global_function("pagedkv.receive_id")(cache, seq_id)


def finish_receive(cache: KVCache, seq_id: int, receive: int) -> None:
    """The rows are there."""
    global_function("pagedkv.finish_receive")(cache, seq_id, receive)


def cancel_receive(cache: KVCache, seq_id: int, receive: int) -> None:
    """Make the sequence what it was before prepare_recv; a removed one's pages are let go."""
    global_function("pagedkv.cancel_receive")(cache, seq_id, receive)


def release_receives(cache: KVCache, receives: Iterable[int]) -> None:
    """Let the pages of receives go: nothing writes to them any more. For the garbage collector.

    As `forget_receiver`, it takes no lock, waits for nothing and raises nothing.
    """
    with contextlib.suppress(Exception):
        for receive in list(receives):
            global_function("pagedkv.release_receive")(cache, receive)


def set_send_handler(
    cache: KVCache, peer: int, handler: Callable[[int], None] | None, num_slots: Sequence[int] = ()
) -> None:
    """Call `handler` with the id of each block that is ready for a receiver; None: no more.

    None may come from any thread and at any moment, from finalizers for example: while the cache is
    busy the handler is dropped by the next call.
    """
    if handler is None:
        global_function("pagedkv.drop_send_handler")(cache, peer)
    else:
        global_function("pagedkv.set_send_handler")(
            cache, peer, handler, tvm_ffi.Shape(tuple(num_slots))
        )


def forget_receiver(cache: KVCache, peer: int) -> None:
    """`set_send_handler` with None, for the garbage collector.

    It runs in whatever thread collects garbage, within whatever that thread is doing: it takes no
    lock, waits for nothing and raises nothing. While the cache is busy its next call drops the
    handler.
    """
    with contextlib.suppress(Exception):
        global_function("pagedkv.drop_send_handler")(cache, peer)


def send_id(cache: KVCache, seq_id: int) -> int:
    """Which send of the sequence has rows that were not ready yet; 0: none."""
    return global_function("pagedkv.send_id")(cache, seq_id)


def cancel_send(cache: KVCache, seq_id: int, send: int) -> None:
    """Make no further rows ready."""
    global_function("pagedkv.cancel_send")(cache, seq_id, send)


def send_block(cache: KVCache, block: int) -> dict[str, Any]:
    """What a block holds; ``runs`` of each group: int64 ``[n, 3]`` source, destination, length."""
    described = dict(global_function("pagedkv.send_block")(cache, block).items())
    described["runs"] = [np.from_dlpack(runs).copy() for runs in described["runs"]]
    return described


def release_send_block(cache: KVCache, block: int) -> None:
    """Let the pages of a block go."""
    global_function("pagedkv.release_send_block")(cache, block)


def pages_of(cache: KVCache, layer: int) -> tvm_ffi.Tensor:
    """The pages of a layer, by its number in `KVCache.description`.

    They are ``[num_pages, 2, num_kv_heads, page_size, head_dim]``; MLA without 2 and heads.
    """
    return global_function("pagedkv.pages_of")(cache, cache.description["layers"][layer]["id"])


def copy_regions(destination: Any, source: Any, regions: np.ndarray) -> None:
    """Copy bytes; regions int64 ``[n, 3]``: destination offset, source offset, number of bytes."""
    regions = tvm.runtime.tensor(np.ascontiguousarray(regions, dtype=np.int64))
    global_function("pagedkv.copy_regions")(destination, source, regions)


def shared_pages(cache: KVCache) -> tuple[int, int]:
    """File descriptor and size of the memory that holds all pages; -1 where it is not shared."""
    descriptor, num_bytes = global_function("pagedkv.shared_pages")(cache)
    return descriptor, num_bytes


def pool_ranges(cache: KVCache) -> list[tuple[int, int]]:
    """Offset and size in bytes of each layer's pages, counted from the first of them in memory."""
    arrays = [pool_address(cache, layer) for layer in range(len(cache.description["layers"]))]
    first = min(address for address, _ in arrays)
    return [(address - first, size) for address, size in arrays]


def pool_address(cache: KVCache, layer: int) -> tuple[int, int]:
    """Address and size in bytes of a layer's pages."""
    pages = pages_of(cache, layer)
    return pages.data_ptr(), int(np.prod(pages.shape)) * pages.dtype.itemsize
