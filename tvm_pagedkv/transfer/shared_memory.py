# SPDX-License-Identifier: Apache-2.0
"""`SharedMemoryChannel`: the receiver maps the sender's pages and copies from them."""

from __future__ import annotations

import fcntl
import mmap
import os
import socket
from typing import Any

import numpy as np
import tvm_ffi

from ..cache import KVCache, page_groups
from . import _runtime
from .channel import ChannelClosed, TransferError
from .layout import pools_of
from .sockets import SocketChannel

_F_GET_SEALS, _F_SEAL_SHRINK = 1034, 0x0002


class SharedMemoryChannel(SocketChannel):
    """A channel between two processes of one host, over a Unix socket.

    The sender's cache must be made with ``enable_kv_transfer``, which allocates its pages in
    anonymous shared memory. The socket passes the file descriptor to the receiver, which maps the
    memory, so rows are copied once, from page to page. The memory is freed when both processes have
    released it, however they end.
    """

    descriptors_wanted = 1  # the sender's memory

    def __init__(self, connection: socket.socket) -> None:
        if connection.family != socket.AF_UNIX:
            raise ValueError("a SharedMemoryChannel needs a Unix socket: give a path")
        super().__init__(connection)
        self._map: mmap.mmap | None = None
        self._sources: dict[int, Any] = {}
        self._cache: KVCache | None = None

    def expose(self, cache: KVCache) -> dict[str, Any]:
        if str(cache.description["device"]).partition(":")[0] != "cpu":
            raise ValueError("a SharedMemoryChannel sends from caches on the CPU")
        descriptor, num_bytes = _runtime.shared_pages(cache)
        if descriptor < 0:
            raise ValueError(
                "a SharedMemoryChannel sends from caches that are made with enable_kv_transfer=True"
            )
        self._descriptors_out = [descriptor]
        self.descriptors_wanted = 0  # only the receiver gets one
        return {"kind": "shared_memory", "bytes": num_bytes, "layers": _runtime.pool_ranges(cache)}

    def attach(self, cache: KVCache, memory: dict[str, Any]) -> None:
        if memory.get("kind") != "shared_memory" or not self._descriptors_in:
            raise ValueError(f"the sender's memory is of kind {memory.get('kind')!r}, not shared")
        pools = pools_of(memory, len(page_groups(cache)))
        descriptor = self._descriptors_in.pop(0)
        try:
            num_bytes = os.fstat(descriptor).st_size
            if not fcntl.fcntl(descriptor, _F_GET_SEALS) & _F_SEAL_SHRINK:
                raise TransferError("the sender could shrink its shared memory while it is read")
            # A private map, because DLPack needs writable memory; nobody writes to it.
            self._map = mmap.mmap(descriptor, num_bytes, access=mmap.ACCESS_COPY)
        except (OSError, ValueError, OverflowError) as error:  # the size is 0 or too large
            raise TransferError(f"cannot map the sender's memory: {error}") from None
        finally:
            os.close(descriptor)
        for layer, (offset, size) in enumerate(pools):
            if offset + size > num_bytes:
                raise TransferError(f"layer {layer} lies outside the sender's memory")
            pages = np.frombuffer(self._map, np.uint8, size, offset)
            self._sources[layer] = tvm_ffi.from_dlpack(pages)
        self._cache = cache

    def read(self, regions: dict[int, np.ndarray], tag: str, timeout: float) -> None:
        if self._cache is None:
            raise ChannelClosed("the channel is closed")
        for layer, rows in regions.items():
            _runtime.copy_regions(_runtime.pages_of(self._cache, layer), self._sources[layer], rows)

    def close(self) -> None:
        super().close()
        self._sources.clear()  # the last one unmaps the memory
        self._map = self._cache = None
