# SPDX-License-Identifier: Apache-2.0
"""`Channel`: messages between a sender and a receiver, and how the receiver reads the pages."""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections import deque
from typing import TYPE_CHECKING, Any

import numpy as np

from ..cache import KVCache
from . import _runtime

if TYPE_CHECKING:
    from typing_extensions import Self


class TransferError(RuntimeError):
    """A transfer failed: says why, and which side found out. Neither cache keeps a part of it."""


class TransferTimeout(TransferError, TimeoutError):
    """The other side did not answer in time."""


class ChannelClosed(TransferError):
    """The other side has closed the channel, or its process has ended."""


class AuthenticationError(TransferError):
    """The other side does not know the secret, or is of another user."""


class MessageError(TransferError):
    """One message is wrong; those after it can be read."""


class Channel(ABC):
    """One end of a connection between a `Sender` and a `Receiver`.

    Messages are dictionaries of JSON values and go both ways, in order. Rows go one way: the
    receiver reads them out of the sender's pages, so that nobody but a receiver ever writes into
    its cache. A sender keeps pages as they are from its offer until the receiver has said that it
    has read them, and confirms this: only confirmed rows count as received.
    """

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    @abstractmethod
    def send(self, message: dict[str, Any]) -> None:
        """Queue a message; never waits. Raises `ChannelClosed`."""

    @abstractmethod
    def receive(self, timeout: float) -> dict[str, Any] | None:
        """The next message; None when none comes within `timeout` seconds (0: is there already).

        Raises `ChannelClosed` once the other side is gone and its last message is read.
        """

    @abstractmethod
    def close(self) -> None:
        """Let go of everything; the other side gets a `ChannelClosed`. May be called again."""

    @abstractmethod
    def expose(self, cache: KVCache) -> dict[str, Any]:
        """Sender: let the other side read the pages; returns what it must know, as JSON values."""

    @abstractmethod
    def attach(self, cache: KVCache, memory: dict[str, Any]) -> None:
        """Receiver: prepare to read what the other side's `expose` has returned."""

    @abstractmethod
    def read(self, regions: dict[int, np.ndarray], tag: str, timeout: float) -> None:
        """Receiver: copy bytes from the other side's pages into one's own.

        Parameters
        ----------
        regions : layer -> int64 ``[n, 3]``
            Destination and source offsets in the layer's pages, and numbers of bytes; within both.
        tag : str
            Names the read; `was_read` on the other side is asked for it.
        timeout : float
            Seconds.

        Raises
        ------
        TransferError
            After it nothing is written any more.
        """

    def was_read(self, tag: str, timeout: float) -> bool:
        """Sender: whether a read of this tag has come to one's own memory.

        It may do so after the receiver has said it; so ask again later. With a `timeout` of 0 it
        does not wait.
        """
        return True


class _LocalEnd:
    """The queue of one direction."""

    def __init__(self) -> None:
        self.messages: deque[dict[str, Any]] = deque()
        self.changed = threading.Condition()
        self.is_closed = False


class LocalChannel(Channel):
    """Between two caches of one process, which may belong to different threads."""

    def __init__(self, inbox: _LocalEnd, outbox: _LocalEnd, caches: dict[str, KVCache]) -> None:
        self._inbox, self._outbox, self._caches = inbox, outbox, caches
        self._source: KVCache | None = None
        self._cache: KVCache | None = None

    def send(self, message: dict[str, Any]) -> None:
        with self._outbox.changed:
            if self._outbox.is_closed:
                raise ChannelClosed("the other side has closed the channel")
            self._outbox.messages.append(message)
            self._outbox.changed.notify()

    def receive(self, timeout: float) -> dict[str, Any] | None:
        inbox = self._inbox
        with inbox.changed:
            inbox.changed.wait_for(lambda: inbox.messages or inbox.is_closed, timeout)
            if inbox.messages:
                return inbox.messages.popleft()
            if inbox.is_closed:
                raise ChannelClosed("the other side has closed the channel")
        return None

    def close(self) -> None:
        for end in (self._inbox, self._outbox):
            with end.changed:
                end.is_closed = True
                end.changed.notify_all()
        self._caches.clear()
        self._source = self._cache = None

    def expose(self, cache: KVCache) -> dict[str, Any]:
        self._caches["source"] = cache
        return {"kind": "local"}

    def attach(self, cache: KVCache, memory: dict[str, Any]) -> None:
        if memory.get("kind") != "local":
            raise ValueError(f"a local channel cannot read memory of kind {memory.get('kind')!r}")
        if "source" not in self._caches:
            raise ChannelClosed("the other side has closed the channel")
        self._source, self._cache = self._caches["source"], cache

    def read(self, regions: dict[int, np.ndarray], tag: str, timeout: float) -> None:
        if self._source is None or self._cache is None:
            raise ChannelClosed("the channel is closed")
        for layer, rows in regions.items():
            pages = _runtime.pages_of(self._cache, layer)
            _runtime.copy_regions(pages, _runtime.pages_of(self._source, layer), rows)


def local_channels() -> tuple[LocalChannel, LocalChannel]:
    """Two ends of a channel within this process, one for a `Sender` and one for a `Receiver`."""
    one, other = _LocalEnd(), _LocalEnd()
    caches: dict[str, KVCache] = {}
    return LocalChannel(one, other, caches), LocalChannel(other, one, caches)
