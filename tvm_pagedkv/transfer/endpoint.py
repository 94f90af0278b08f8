# SPDX-License-Identifier: Apache-2.0
"""The common base of `Sender` and `Receiver`: hello messages, polling, untrusted messages."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any

from ..cache import KVCache
from .channel import Channel, ChannelClosed, MessageError, TransferError, TransferTimeout
from .clock import Deadline
from .layout import check_layout, check_model, layout_of, num_slots_of

if TYPE_CHECKING:
    from typing_extensions import Self

_MAX_MESSAGES = 256  # per poll, so that a poll ends even if the peer never stops sending
_MAX_QUOTED = 200  # characters of a peer's value in an error


def field(message: dict[str, Any], name: str, kind: type) -> Any:
    """Return a field of a message; raise a `MessageError` if it is missing or has another type."""
    value = message.get(name)
    if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
        raise MessageError(
            f"the other side sent a {quote(message.get('type'))} message whose {name} is "
            f"{quote(value)}, which is not of type {kind.__name__}"
        )
    return value


def integers(message: dict[str, Any], name: str) -> list[int]:
    """Return a list of 64-bit integers from a message; raise a `MessageError` otherwise."""
    values = field(message, name, list)
    for value in values:
        if not (type(value) is int and -(2**63) <= value < 2**63):
            raise MessageError(
                f"the other side sent {quote(value)} in {name}, expected 64-bit integers"
            )
    return values


def quote(value: Any) -> str:
    """Return a peer's value as text for an error, shortened."""
    text = repr(value)
    return text if len(text) <= _MAX_QUOTED else f"{text[:_MAX_QUOTED]}..."


class Endpoint(ABC):
    """One side of a transfer. It sends a hello when it is made, and checks the peer's hello."""

    role = ""

    def __init__(
        self, cache: KVCache, channel: Channel, timeout: float, model: dict[str, Any] | None = None
    ) -> None:
        if not isinstance(cache, KVCache):
            raise TypeError(f"cache must be a tvm_pagedkv.KVCache, got {type(cache).__name__}")
        if not isinstance(channel, Channel):
            raise TypeError(f"channel must be a Channel, got {type(channel).__name__}")
        if not timeout > 0:
            raise ValueError(f"timeout must be positive, got {timeout}")
        self.cache, self.channel, self.timeout = cache, channel, float(timeout)
        self.is_connected = False
        self.error: Exception | None = None  # the connection has failed with it
        self._layout, self._model = layout_of(cache), model
        hello: dict[str, Any] = {"type": "hello", "role": self.role, "layout": self._layout}
        hello |= {"num_slots": num_slots_of(cache), "memory": self._memory(), "model": model}
        channel.send(hello)

    def connect(self, timeout: float | None = None) -> None:
        """Wait for the peer's hello.

        Parameters
        ----------
        timeout : float, optional
            Seconds; None: the timeout of this object.

        Raises
        ------
        ValueError
            If the layouts of the two caches differ, or the models; the peer gets the same error.
        TransferTimeout, ChannelClosed
            If the hello does not come in time, or the peer is gone.
        """
        deadline = Deadline(self.timeout if timeout is None else timeout)
        while not self.is_connected:
            if not self.poll(deadline.left()) and not self.is_connected and not deadline.left():
                raise TransferTimeout(f"the other side did not say hello to this {self.role}")

    def poll(self, timeout: float = 0.0) -> bool:
        """Handle the messages that have arrived; wait up to `timeout` seconds for the first one.

        Returns
        -------
        bool
            Whether there was a message.

        Raises
        ------
        ValueError
            If the layouts of the two caches differ, or the models.
        TransferError
            If the connection has failed, and with it all transfers.
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
        """Close the connection. Transfers in progress fail on both sides."""
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
        """Handle the rest of the peer's hello, after the layouts have been compared."""

    @abstractmethod
    def _handle(self, message: dict[str, Any]) -> None:
        """Handle a message after the hello."""

    @abstractmethod
    def _abandon(self, error: Exception) -> None:
        """Fail all transfers with this error."""

    def _reject(self, message: Any, error: MessageError) -> None:
        """Handle an invalid message (None if it could not be parsed): fail the connection."""
        self._fail(error)
        raise error

    def _dispatch(self, message: Any) -> None:
        if not isinstance(message, dict):
            raise MessageError(f"the other side sent {quote(message)}, which is not a message")
        kind = message.get("type")
        if kind == "hello":
            if self.is_connected:
                raise TransferError("the other side said hello twice")
            if message.get("role") == self.role:
                raise ValueError(f"both ends of the channel belong to a {self.role}")
            check_layout(self._layout, message.get("layout"))
            check_model(self._model, message.get("model"))
            self._greet(message)
            self.is_connected = True
        elif kind == "goodbye":
            raise ChannelClosed(f"the other side has ended: {quote(message.get('reason'))}")
        elif not self.is_connected:
            raise TransferError(f"the other side sent {quote(kind)} before its hello")
        else:
            self._handle(message)

    def _poll_for(self, transfer: Any, timeout: float) -> bool:
        """Poll for a transfer; the peer may close the connection once it is done."""
        try:
            return self.poll(timeout) or transfer.is_done
        except TransferError:
            if transfer.is_done:
                return True
            raise

    def _say(self, message: dict[str, Any]) -> None:
        """Send a message; if that fails, fail the connection."""
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
            pass  # the first error is the one to report
        self.channel.close()
