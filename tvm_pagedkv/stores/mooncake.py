# SPDX-License-Identifier: Apache-2.0
"""`MooncakeStore`: pages of prefixes in the memory of many machines, through Mooncake Store."""

from __future__ import annotations

import ctypes
import importlib.util
import mmap
import os
import socket
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from .._checks import check_choice, check_int
from .memory import check_batch, check_keys, view

# Of Mooncake's ErrorCode: no room, another size, not yet written, no such key, there, leased.
_NO_FAILURE = {-200, -600, -703, -704, -705, -706}
_CONNECT_SECONDS = 5.0


def _library() -> Any:
    try:
        _load_cuda_runtime()
        from mooncake import store
    except ImportError as error:
        raise ImportError(
            f"MooncakeStore needs Mooncake ({error}); install it with: "
            "pip install 'tvm-pagedkv[mooncake]', and the system's package libibverbs1"
        ) from None
    return store


def _load_cuda_runtime() -> None:
    """Load libcudart from its Python package: Mooncake links it, with a GPU or without."""
    found = importlib.util.find_spec("nvidia")
    for folder in found.submodule_search_locations or () if found else ():
        for library in Path(folder).glob("cuda_runtime/lib/libcudart.so.12*"):
            ctypes.CDLL(str(library), ctypes.RTLD_GLOBAL)
            return


def _check_reachable(master: str) -> None:
    """Raise if nothing listens at ``host:port``: Mooncake itself tries for a minute and a half."""
    host, _, port = master.rpartition(":")
    if "/" in master or not port.isdigit():  # several masters behind a name
        return
    try:
        socket.create_connection((host.strip("[]"), int(port)), _CONNECT_SECONDS).close()
    except OSError as error:
        raise ConnectionError(f"no mooncake_master answers at {master}: {error}") from None


class MooncakeStore:
    """A store of pages in Mooncake Store: memory of many machines, over TCP or RDMA.

    Memory that was registered is read and written in place. Other memory goes through a buffer.

    Parameters
    ----------
    master : str
        ``"host:port"`` of mooncake_master.
    metadata : str
        Address of the metadata service; ``"P2PHANDSHAKE"`` needs none.
    protocol : str
        "tcp" or "rdma".
    devices : str
        Names of RDMA devices, separated by commas.
    host : str
        Name or address of this machine, by which others reach it.
    segment_bytes : int
        Memory that this process adds to the store; 0 for none.
    buffer_bytes : int
        Memory for values at addresses that were not registered; the largest such value.

    Raises
    ------
    ImportError
        If Mooncake is not installed, or a library that it needs.
    ConnectionError
        If the master cannot be reached.

    Notes
    -----
    If values fail and none succeeds, a call raises a ConnectionError. The master and all machines
    of the store are trusted: each can read and change K and V. Put it into a `GuardedStore`: after
    the master has gone, calls take seconds.
    """

    def __init__(
        self,
        master: str,
        metadata: str = "P2PHANDSHAKE",
        protocol: str = "tcp",
        *,
        devices: str = "",
        host: str = "127.0.0.1",
        segment_bytes: int = 0,
        buffer_bytes: int = 64 << 20,
    ) -> None:
        check_choice("protocol", protocol, ("tcp", "rdma"))
        check_int("segment_bytes", segment_bytes, 0, 2**48)
        check_int("buffer_bytes", buffer_bytes, 1 << 20, 2**40)
        library = _library()
        _check_reachable(master)
        self._process = os.getpid()
        self._registered: dict[int, int] = {}
        self._is_closed = False
        self._client = library.MooncakeDistributedStore()
        code = self._client.setup(
            host, metadata, segment_bytes, 16 << 20, protocol, devices, master
        )
        if code != 0:
            raise ConnectionError(
                f"no mooncake_master takes this client at {master} (error {code})"
            )
        self._buffer = memoryview(mmap.mmap(-1, buffer_bytes))
        self._address = np.frombuffer(self._buffer, np.uint8).ctypes.data
        self.register(self._address, buffer_bytes)

    def exists(self, keys: Sequence[bytes]) -> list[bool]:
        """Return for each key whether the master knows a value."""
        check_keys(keys)
        self._check_usable()
        return self._results(self._client.batch_is_exist([key.hex() for key in keys]), {1})

    def get_into(
        self, keys: Sequence[bytes], addresses: Sequence[int], sizes: Sequence[int]
    ) -> list[bool]:
        """Read values to addresses; return for each whether one of that size was read."""
        check_batch(keys, addresses, sizes)
        self._check_usable()
        results = [False] * len(keys)
        for indices, places in self._batches(addresses, sizes):
            hits = self._transfer(self._client.batch_get_into, keys, sizes, indices, places)
            for i, place, hit in zip(indices, places, hits, strict=True):
                results[i] = hit
                if hit and place != addresses[i]:
                    view(addresses[i], sizes[i])[:] = view(place, sizes[i])
        return results

    def put_from(
        self, keys: Sequence[bytes], addresses: Sequence[int], sizes: Sequence[int]
    ) -> list[bool]:
        """Write values; return for each whether the store has it."""
        check_batch(keys, addresses, sizes)
        self._check_usable()
        results = [False] * len(keys)
        for indices, places in self._batches(addresses, sizes):
            for i, place in zip(indices, places, strict=True):
                if place != addresses[i]:
                    view(place, sizes[i])[:] = view(addresses[i], sizes[i])
            kept = self._transfer(self._client.batch_put_from, keys, sizes, indices, places)
            for i, is_kept in zip(indices, kept, strict=True):
                results[i] = is_kept
        return results

    def register(self, address: int, size: int) -> None:
        """Register memory, which must stay there until `close`.

        Raises
        ------
        OSError
            If Mooncake cannot register it.
        """
        self._check_usable()
        code = self._client.register_buffer(address, size)
        if code != 0:
            raise OSError(f"Mooncake cannot register {size} bytes at {address:#x} (error {code})")
        self._registered[address] = size

    def close(self) -> None:
        """Unregister all memory and leave the store; closing again does nothing."""
        if not self._is_closed:
            self._is_closed = True
            for address in list(self._registered):
                self._unregister(address)
            self._client.close()

    def _unregister(self, address: int) -> None:
        self._client.unregister_buffer(address)
        del self._registered[address]

    def _batches(
        self, addresses: Sequence[int], sizes: Sequence[int]
    ) -> Iterator[tuple[list[int], list[int]]]:
        """Yield values that one call transfers: their indices, and a registered address of each."""
        indices: list[int] = []
        places: list[int] = []
        at = 0
        for i, (address, size) in enumerate(zip(addresses, sizes, strict=True)):
            place = address
            if not self._is_registered(address, size):
                if size > len(self._buffer):
                    continue
                if at + size > len(self._buffer):
                    yield indices, places
                    indices, places, at = [], [], 0
                place = self._address + at
                at += -(-size // 64) * 64
            indices.append(i)
            places.append(place)
        if indices:
            yield indices, places

    def _is_registered(self, address: int, size: int) -> bool:
        return any(
            start <= address and address + size <= start + length
            for start, length in self._registered.items()
        )

    def _transfer(
        self,
        function: Callable[[list[str], list[int], list[int]], list[int]],
        keys: Sequence[bytes],
        sizes: Sequence[int],
        indices: list[int],
        places: list[int],
    ) -> list[bool]:
        codes = function([keys[i].hex() for i in indices], places, [sizes[i] for i in indices])
        if function == self._client.batch_put_from:
            return self._results(codes, {0})
        lengths = [sizes[i] for i in indices]
        self._results(codes, set(lengths))
        return [code == length for code, length in zip(codes, lengths, strict=True)]

    def _results(self, codes: Sequence[int], good: set[int]) -> list[bool]:
        """Return which codes are good; raise if none is and one tells of a failure."""
        results = [code in good for code in codes]
        failed = [code for code in codes if code < 0 and code not in _NO_FAILURE]
        if failed and not any(results):
            raise ConnectionError(f"Mooncake fails with error {failed[0]}")
        return results

    def _check_usable(self) -> None:
        if self._is_closed:
            raise ValueError("the MooncakeStore is closed")
        if os.getpid() != self._process:
            raise RuntimeError("a MooncakeStore cannot be used after a fork; make one in the child")
