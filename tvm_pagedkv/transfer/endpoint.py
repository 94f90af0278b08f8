# SPDX-License-Identifier: Apache-2.0
"""What `Sender` and `Receiver` share: the handshake, and messages that may be anything."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any

from ..cache import KVCache
from .channel import Channel, ChannelClosed, MessageError, TransferError, TransferTimeout
from .layout import check_layout, layout_of, num_slots_of

if TYPE_CHECKING:
    from typing_extensions import Self

_MAX_MESSAGES = 256  # that one poll handles, so that it ends also if the other side never does
_MAX_QUOTED = 200  # characters of what the other side sent, in an error


def field(message: dict[str, Any], name: str, kind: type) -> Any:
    """A field of a message; a `MessageError` where it is missing or of another type."""
    value = message.get(name)
    if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
        raise MessageError(
            f"the other side sent a {quote(message.get('type'))} message whose {name} is "
            f"{quote(value)}, which is no {kind.__name__}"
        )
    return value


def integers(message: dict[str, Any], name: str) -> list[int]:
    """A field that is a list of 64-bit integers; a `MessageError` where it is not."""
    values = field(message, name, list)
    for value in values:
        if not (type(value) is int and -(2**63) <= value < 2**63):
            raise MessageError(
                f"the other side sent {quote(value)} in {name}, expected 64-bit integers"
            )
    return values


def quote(value: Any) -> str:
    """What the other side sent, as it reads in an error."""
    text = repr(value)
    return text if len(text) <= _MAX_QUOTED else f"{text[:_MAX_QUOTED]}..."


class Deadline:
    """Seconds that are left."""

    def __init__(self, seconds: float) -> None:
        self._end = time.monotonic() + seconds

    def left(self) -> float:
        return max(0.0, self._end - time.monotonic())


class Endpoint(ABC):
    """One side: says hello when it is made, checks the other side's hello when that comes."""

    role = ""

    def __init__(self, cache: KVCache, channel: Channel, timeout: float) -> None:
        if not isinstance(cache, KVCache):
            raise TypeError(f"cache must be a tvm_pagedkv.KVCache, got {type(cache).__name__}")
        if not isinstance(channel, Channel):
            raise TypeError(f"channel must be a Channel, got {type(channel).__name__}")
        if not timeout > 0:
            raise ValueError(f"timeout must be positive, got {timeout}")
        self.cache, self.channel, self.timeout = cache, channel, float(timeout)
        self.is_connected = False
        self.error: Exception | None = None  # after it the connection is of no more use
        self._layout = layout_of(cache)
        hello: dict[str, Any] = {"type": "hello", "role": self.role, "layout": self._layout}
        hello |= {"num_slots": num_slots_of(cache), "memory": self._memory()}
        channel.send(hello)

    def connect(self, timeout: float | None = None) -> None:
        """Wait until the other side has said hello.

        Raises
        ------
        ValueError
            Where the two caches do not fit together; the other side gets the same.
        TransferTimeout, ChannelClosed
        """
        deadline = Deadline(self.timeout if timeout is None else timeout)
        while not self.is_connected:
            if not self.poll(deadline.left()) and not self.is_connected and not deadline.left():
                raise TransferTimeout(f"the other side did not say hello to this {self.role}")

    def poll(self, timeout: float = 0.0) -> bool:
        """Handle the messages that are there, or wait up to `timeout` seconds for one.

        Returns
        -------
        bool
            Whether there was any.

        Raises
        ------
        ValueError
            Where the two caches do not fit together.
        TransferError
            Where the connection has failed; so have all its transfers.
        """
        if self.error is not None:
            raise self.error
        num_found = 0
        while num_found < _MAX_MESSAGES:
            message = None
            try:
                message = self.channel.receive(0.0 if num_found else timeout)
                if message is None:
                    break
                self._dispatch(message)
            except MessageError as error:
                self._reject(message, error)
            except Exception as error:
                self._fail(error)
                raise
            num_found += 1
        return num_found > 0

    def close(self) -> None:
        """End the connection; transfers that are under way fail on both sides."""
        if self.error is None:
            self._fail(TransferError(f"this {self.role} was closed"))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    # --- for the two sides ----------------------------------------------------------------------

    def _memory(self) -> dict[str, Any]:
        return {}

    @abstractmethod
    def _greet(self, hello: dict[str, Any]) -> None:
        """The caches fit together; this is the rest of what the other side said."""

    @abstractmethod
    def _handle(self, message: dict[str, Any]) -> None:
        """A message after the hello."""

    @abstractmethod
    def _abandon(self, error: Exception) -> None:
        """All transfers fail with this error."""

    def _reject(self, message: Any, error: MessageError) -> None:
        """A message is wrong, None if it could not be read: nothing can be said any more."""
        self._fail(error)
        raise error

    def _dispatch(self, message: Any) -> None:
        if not isinstance(message, dict):
            raise MessageError(f"the other side sent {quote(message)}, which is no message")
        kind = message.get("type")
        if kind == "hello":
            if self.is_connected:
                raise TransferError("the other side said hello twice")
            if message.get("role") == self.role:
                raise ValueError(f"both ends of the channel belong to a {self.role}")
            check_layout(self._layout, message.get("layout"))
            self._greet(message)
            self.is_connected = True
        elif kind == "goodbye":
            raise ChannelClosed(f"the other side has ended: {quote(message.get('reason'))}")
        elif not self.is_connected:
            raise TransferError(f"the other side sent {quote(kind)} before its hello")
        else:
            self._handle(message)

    def _poll_for(self, transfer: Any, timeout: float) -> bool:
        """`poll`, where the other side may end the connection once this transfer is done."""
        try:
            return self.poll(timeout) or transfer.is_done
        except TransferError:
            if transfer.is_done:
                return True
            raise

    def _say(self, message: dict[str, Any]) -> None:
        """Send a message; all is over when that is not possible."""
        try:
            self.channel.send(message)
        except TransferError as error:
            self._fail(error)
            raise

    def _fail(self, error: Exception) -> None:
        self.error = error
        self._abandon(error)
        try:
            self.channel.send({"type": "goodbye", "reason": str(error)})
        except Exception:
            pass  # the first error is the one that counts
        self.channel.close()
