# SPDX-License-Identifier: Apache-2.0
"""`Channel`: messages between a sender and a receiver, and reads of the sender's pages."""

from __future__ import annotations

import os
import threading
import weakref
from abc import ABC, abstractmethod
from collections import deque
from typing import TYPE_CHECKING, Any

import numpy as np

from ..cache import KVCache
from . import _runtime

if TYPE_CHECKING:
    from typing_extensions import Self


_of_parent: weakref.WeakSet[Any] = weakref.WeakSet()


def close_in_children(connection: Any) -> None:
    """Call the `abandon` of a connection in forked children: it is the parent's.

    So a child sends nothing and removes nothing, and a peer notices when the parent is gone.
    """
    _of_parent.add(connection)


def _abandon_all() -> None:
    for connection in list(_of_parent):
        connection.abandon()


os.register_at_fork(after_in_child=_abandon_all)


class TransferError(RuntimeError):
    """A transfer failed. Neither cache keeps a part of it."""


class TransferTimeout(TransferError, TimeoutError):
    """The peer did not answer in time."""


class ChannelClosed(TransferError):
    """The peer has closed the channel, or its process has ended."""


class AuthenticationError(TransferError):
    """The peer does not know the secret, or runs as another user."""


class MessageError(TransferError):
    """A message is invalid. Later messages can still be read."""


class Channel(ABC):
    """One end of a connection between a `Sender` and a `Receiver`.

    Messages are dictionaries of JSON values, go both ways, and arrive in order. Rows go one way:
    the receiver reads them from the sender's pages, so only the receiver writes to its own cache.
    The sender pins pages from the offer until the receiver reports that it has read them, and
    confirms the report. Only confirmed rows count as received.

    A channel is a context manager that closes it.
    """

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    @abstractmethod
    def send(self, message: dict[str, Any]) -> None:
        """Queue a message without waiting.

        Raises
        ------
        ChannelClosed
            If either side has closed the channel.
        """

    @abstractmethod
    def receive(self, timeout: float) -> dict[str, Any] | None:
        """Return the next message, or None if none arrives within `timeout` seconds.

        Raises
        ------
        ChannelClosed
            If the channel is closed and the last message has been read.
        MessageError
            If the message is invalid.
        """

    @abstractmethod
    def close(self) -> None:
        """Release everything; the peer gets a `ChannelClosed`. Repeated calls do nothing."""

    @abstractmethod
    def expose(self, cache: KVCache) -> dict[str, Any]:
        """Make the pages readable for the peer. The sender calls this.

        Returns
        -------
        dict
            JSON values that the peer passes to `attach`.
        """

    @abstractmethod
    def attach(self, cache: KVCache, memory: dict[str, Any]) -> None:
        """Prepare reads of the peer's pages. The receiver calls this.

        Parameters
        ----------
        cache : KVCache
            The receiving cache.
        memory : dict
            The result of the peer's `expose`.
        """

    @abstractmethod
    def read(self, regions: dict[int, np.ndarray], tag: str, timeout: float) -> None:
        """Copy bytes from the peer's pages into the own pages. The receiver calls this.

        Parameters
        ----------
        regions : dict
            Layer -> int64 ``[n, 3]``: destination offset, source offset and size of each region, in
            bytes, within the layer's pages on both sides.
        tag : str
            Identifies the read for the peer's `was_read`.
        timeout : float
            Seconds.

        Raises
        ------
        TransferError
            If the read fails. Nothing is written after that.
        """

    def was_read(self, tag: str, timeout: float) -> bool:
        """Return whether a read with this tag has reached the own memory. The sender calls this.

        The receiver's report can arrive earlier, so ask again later. With a `timeout` of 0 this
        does not wait.
        """
        return True


class _LocalEnd:
    """The message queue of one direction."""

    def __init__(self) -> None:
        self.messages: deque[dict[str, Any]] = deque()
        self.changed = threading.Condition()
        self.is_closed = False


class LocalChannel(Channel):
    """A channel between two caches of one process, which may belong to different threads."""

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
    """Return two ends of a channel in this process, for a `Sender` and a `Receiver`."""
    one, other = _LocalEnd(), _LocalEnd()
    caches: dict[str, KVCache] = {}
    return LocalChannel(one, other, caches), LocalChannel(other, one, caches)
