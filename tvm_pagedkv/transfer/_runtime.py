# SPDX-License-Identifier: Apache-2.0
"""The runtime's global functions for transfers, with Python types."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
import tvm
import tvm_ffi

from .._functions import global_function
from ..cache import KVCache, page_groups


def prepare_recv(cache: KVCache, seq_id: int, length: int) -> list[int]:
    """Reserve pages for `length` more positions of a sequence.

    Returns
    -------
    list of int
        The map of their slots: for each layer group the number of runs, then the first slot and the
        length of each run; slot -1 where a window keeps none. Then for each state group 0, or 1,
        the page for a state, and the number of positions that the state covers.
    """
    return list(global_function("vm.builtin.kv_cache_disagg_prepare_recv")(cache, seq_id, length))


def mark_send(cache: KVCache, seq_id: int, begin: int, slots: Sequence[int], peer: int) -> None:
    """Offer the positions from `begin` on to a receiver as they are computed.

    Parameters
    ----------
    slots : sequence of int
        The receiver's map, from `prepare_recv`.
    peer : int
        The number of the receiver, as in `set_send_handler`.
    """
    mark = global_function("vm.builtin.kv_cache_disagg_mark_send")
    mark(cache, seq_id, begin, tvm_ffi.Shape(tuple(slots)), peer)


def receive_id(cache: KVCache, seq_id: int) -> int:
    """Return the id of the receive in progress of a sequence; 0: none.

    After this call its pages stay reserved until the receive is finished, cancelled or released,
    even if the sequence is removed, because the transport may still write to them.
    """
    return global_function("pagedkv.receive_id")(cache, seq_id)


def shorten_receive(cache: KVCache, seq_id: int, receive: int, firsts: Sequence[int]) -> list[int]:
    """Leave out first positions of a receive that the sender lacks.

    Parameters
    ----------
    firsts : sequence of int
        As `first_to_send` returns them. What is not later stays as it was requested.

    Returns
    -------
    list of int
        The pages of the states to come, per state group; -1: none is received.
    """
    firsts = tvm_ffi.Shape(tuple(firsts))
    return list(global_function("pagedkv.shorten_receive")(cache, seq_id, receive, firsts))


def finish_receive(cache: KVCache, seq_id: int, receive: int) -> None:
    """Complete a receive: all of its rows have been written."""
    global_function("pagedkv.finish_receive")(cache, seq_id, receive)


def cancel_receive(cache: KVCache, seq_id: int, receive: int) -> None:
    """Restore a sequence as it was before `prepare_recv`, or free the pages of a removed one."""
    global_function("pagedkv.cancel_receive")(cache, seq_id, receive)


def release_receives(cache: KVCache, receives: Iterable[int]) -> None:
    """Free the pages of receives that no transport writes to any more.

    For finalizers: like `forget_receiver`, it takes no lock, does not wait and does not raise.
    """
    with contextlib.suppress(Exception):
        for receive in list(receives):
            global_function("pagedkv.release_receive")(cache, receive)


def set_send_handler(
    cache: KVCache, peer: int, handler: Callable[[int], None] | None, num_slots: Sequence[int] = ()
) -> None:
    """Set the function that is called with the id of each block that is ready for a receiver.

    Parameters
    ----------
    peer : int
        The number of the receiver.
    handler : callable, optional
        None removes the handler. This is allowed from any thread at any time: if the cache is busy,
        its next call removes the handler.
    num_slots : sequence of int
        Slots of the receiver's pool, per layer group; then pages, per state group.
    """
    if handler is None:
        global_function("pagedkv.drop_send_handler")(cache, peer)
    else:
        global_function("pagedkv.set_send_handler")(
            cache, peer, handler, tvm_ffi.Shape(tuple(num_slots))
        )


def forget_receiver(cache: KVCache, peer: int) -> None:
    """Remove the handler of a receiver, from a finalizer.

    A finalizer can run in any thread, inside any call, so this takes no lock, does not wait and
    does not raise. If the cache is busy, its next call removes the handler.
    """
    with contextlib.suppress(Exception):
        global_function("pagedkv.drop_send_handler")(cache, peer)


def first_to_send(cache: KVCache, seq_id: int, begin: int, end: int) -> list[int]:
    """Return what of positions [begin, end) a sequence can send.

    Returns
    -------
    list of int
        Per layer group the first position: the earliest one that the receiver keeps and that the
        sequence has. Then per state group the positions that the state to send covers; 0: none.
    """
    return list(global_function("pagedkv.first_to_send")(cache, seq_id, begin, end))


def send_id(cache: KVCache, seq_id: int) -> int:
    """Return the id of the send of a sequence that still waits for rows; 0: none."""
    return global_function("pagedkv.send_id")(cache, seq_id)


def cancel_send(cache: KVCache, seq_id: int, send: int) -> None:
    """Stop a send: offer no further rows."""
    global_function("pagedkv.cancel_send")(cache, seq_id, send)


def send_block(cache: KVCache, block: int) -> dict[str, Any]:
    """Describe a block of rows.

    Returns
    -------
    dict
        ``sequence_id``, ``send_id``, ``begin`` and ``end`` (positions), and ``runs``: for each
        layer group int64 ``[n, 3]`` with source slot, destination slot and length; then the same
        for each state group, with pages in place of slots.
    """
    described = dict(global_function("pagedkv.send_block")(cache, block).items())
    described["runs"] = [np.from_dlpack(runs).copy() for runs in described["runs"]]
    return described


def release_send_block(cache: KVCache, block: int) -> None:
    """Unpin the pages of a block."""
    global_function("pagedkv.release_send_block")(cache, block)


def pages_of(cache: KVCache, page_group: int) -> tvm_ffi.Tensor:
    """Return the pages of a layer, or of its states.

    Parameters
    ----------
    page_group : int
        Index in `page_groups`.

    Returns
    -------
    tensor ``[num_pages, 2, num_kv_heads, page_size, head_dim]``
        Of layers with one row in a slot: ``[num_pages, page_size, width]``. Quantized: uint8
        ``[num_pages, page_bytes]``. States: ``[num_pages, num_heads, key_dim, value_dim]``.
    """
    return global_function("pagedkv.pool_of")(cache, page_group)


def copy_regions(destination: Any, source: Any, regions: np.ndarray) -> None:
    """Copy regions of bytes.

    Parameters
    ----------
    destination, source : contiguous tensors
    regions : int64 ``[n, 3]``
        Destination offset, source offset and size of each region, in bytes.
    """
    regions = tvm.runtime.tensor(np.ascontiguousarray(regions, dtype=np.int64))
    global_function("pagedkv.copy_regions")(destination, source, regions)


def shared_pages(cache: KVCache) -> tuple[int, int]:
    """Return the file descriptor (-1: not shared) and size in bytes of the memory of all pages."""
    descriptor, num_bytes = global_function("pagedkv.shared_pages")(cache)
    return descriptor, num_bytes


def pool_ranges(cache: KVCache) -> list[tuple[int, int]]:
    """Return each page group's pages as offset from the lowest address, and size, in bytes."""
    arrays = [pool_address(cache, index) for index in range(len(page_groups(cache)))]
    first = min(address for address, _ in arrays)
    return [(address - first, size) for address, size in arrays]


def pool_address(cache: KVCache, page_group: int) -> tuple[int, int]:
    """Return the address and size in bytes of the pages of a page group."""
    pages = pages_of(cache, page_group)
    return pages.data_ptr(), int(np.prod(pages.shape)) * pages.dtype.itemsize
