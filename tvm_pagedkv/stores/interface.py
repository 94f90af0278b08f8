# SPDX-License-Identifier: Apache-2.0
"""The interface of a store of pages: values of bytes under keys of bytes, in batches."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol


class PageStore(Protocol):
    """A place outside the process where pages of prefixes are kept.

    Values are opaque: the cache puts a header with a checksum into each and verifies it after each
    read. Addresses are of host memory that stays valid during the call. A store may lose values at
    any time, and may be used by several processes. Methods may raise any exception: the cache
    takes it for a miss. They are called by one thread at a time.

    A store whose `get_into` verifies checksums of its own can say so by an attribute
    ``verifies_values = True``: then the cache verifies its own one only when a page is filled.
    """

    def exists(self, keys: Sequence[bytes]) -> list[bool]:
        """Return for each key of 32 bytes whether the store has a value."""

    def get_into(
        self, keys: Sequence[bytes], addresses: Sequence[int], sizes: Sequence[int]
    ) -> list[bool]:
        """Read values to addresses; return for each whether `sizes[i]` bytes were read.

        A value of another size is a miss.
        """

    def put_from(
        self, keys: Sequence[bytes], addresses: Sequence[int], sizes: Sequence[int]
    ) -> list[bool]:
        """Write `sizes[i]` bytes from each address; return for each whether the store has it."""

    def register(self, address: int, size: int) -> None:
        """Prepare memory that later calls read and write, such as for RDMA. May do nothing."""

    def close(self) -> None:
        """Release what the store holds; closing again does nothing."""
