# SPDX-License-Identifier: Apache-2.0
"""`SocketChannel`: JSON messages over a stream socket, for channels between processes."""

from __future__ import annotations

import array
import contextlib
import json
import os
import selectors
import socket
import struct
import weakref
from typing import TYPE_CHECKING, Any

from . import clock
from .addresses import Address, check_peer
from .authentication import AuthenticatedSocket
from .channel import Channel, ChannelClosed, MessageError, TransferError, close_in_children
from .connections import Listener, connect

if TYPE_CHECKING:
    from typing_extensions import Self

_HEADER = struct.Struct("<I")  # size in bytes of the message that follows
_MAX_MESSAGE = 1 << 26
_CHUNK = 1 << 18
_MAX_DESCRIPTORS = 16  # per read; the operating system closes the others
_DESCRIPTOR_BYTES = array.array("i").itemsize
_CLOSE_ON_EXEC = getattr(socket, "MSG_CMSG_CLOEXEC", 0)  # Linux


class SocketChannel(Channel):
    """A channel whose messages go over a socket.

    When a process ends, the operating system closes its sockets, so the peer notices at once.

    Parameters
    ----------
    connection : socket.socket
        A connected Unix socket, which the channel owns from now on. TCP connections come only from
        `listen`, `listener` and `connect`, which authenticate the peer.

    Raises
    ------
    AuthenticationError
        If the peer runs as another user.
    ValueError
        If a TCP connection has not been authenticated.
    """

    descriptors_wanted = 0  # number of file descriptors that the peer may still send

    def __init__(self, connection: socket.socket) -> None:
        if connection.family == socket.AF_UNIX:
            check_peer(connection)
        elif isinstance(connection, AuthenticatedSocket):
            # So that a dead host is noticed while no messages are exchanged.
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        else:
            raise ValueError("a TCP connection must come from listen or connect of the channel")
        connection.setblocking(False)
        self._socket: socket.socket | None = connection
        self._incoming, self._outgoing = bytearray(), bytearray()
        self._is_ended = False
        self._descriptors_out: list[int] = []  # sent with the next bytes
        self._descriptors_in: list[int] = []
        # For a channel that is dropped without being closed.
        weakref.finalize(self, _close_all, self._descriptors_in)
        self._selector = selectors.DefaultSelector()
        self._selector.register(connection, selectors.EVENT_READ)
        close_in_children(self)

    @classmethod
    def listener(cls, address: Address, secret: bytes | None = None, **options: Any) -> Listener:
        """Return a `Listener` that makes channels of this class; see there for arguments."""
        return Listener(cls, address, secret, **options)

    @classmethod
    def listen(
        cls, address: Address, timeout: float = 30.0, secret: bytes | None = None, **options: Any
    ) -> Self:
        """Wait for one peer and return a channel; see `Listener` for arguments and errors."""
        with cls.listener(address, secret, **options) as listener:
            return listener.accept(timeout)

    @classmethod
    def connect(
        cls, address: Address, timeout: float = 30.0, secret: bytes | None = None, **options: Any
    ) -> Self:
        """Connect to a listener, and wait until there is one.

        Parameters
        ----------
        address : path or (host, port)
        timeout : float
            Seconds in total, for name resolution, connection and handshake.
        secret : bytes, optional
            The shared secret; see `Listener`.

        Raises
        ------
        TypeError, ValueError
            If the address or the secret is invalid.
        AuthenticationError, TransferTimeout, TransferError
            If the peer is not authentic, does not answer in time, or cannot be reached.
        """
        connection = connect(address, timeout, secret)
        try:
            return cls(connection, **options)
        except BaseException:
            connection.close()
            raise

    def send(self, message: dict[str, Any]) -> None:
        if self._socket is None:
            raise ChannelClosed("the channel is closed")
        data = json.dumps(message, separators=(",", ":"), allow_nan=True).encode()
        if len(data) > _MAX_MESSAGE or len(self._outgoing) > _MAX_MESSAGE:
            raise TransferError(f"a message of {len(data)} bytes does not fit into the channel")
        self._outgoing += _HEADER.pack(len(data)) + data
        self._flush()

    def receive(self, timeout: float) -> dict[str, Any] | None:
        end = clock.now() + timeout
        while True:
            message = self._next_message()
            if message is not None:
                return message
            if self._socket is None or self._is_ended:
                where = " in the middle of a message" if self._incoming else ""
                raise ChannelClosed(
                    f"the other side has closed the channel{where}, or its process is gone"
                )
            self._flush()
            events = selectors.EVENT_READ | (selectors.EVENT_WRITE if self._outgoing else 0)
            self._selector.modify(self._socket, events)
            if not clock.wait(self._selector, max(0.0, end - clock.now())):
                return None
            self._fill()

    def close(self) -> None:
        if self._socket is None:
            return
        with contextlib.suppress(TransferError):
            self._flush()
        self.abandon()

    def abandon(self) -> None:
        """Close what a forked child has of its parent's connection, which goes on."""
        if self._socket is None:
            return
        self._selector.close()
        self._socket.close()
        self._socket = None
        self._incoming.clear()
        self._outgoing.clear()
        _close_all(self._descriptors_in)

    def _next_message(self) -> Any:
        if len(self._incoming) < _HEADER.size:
            return None
        (size,) = _HEADER.unpack_from(self._incoming)
        if size > _MAX_MESSAGE:
            raise TransferError(f"the other side announces a message of {size} bytes")
        end = _HEADER.size + size
        if len(self._incoming) < end:
            return None
        data = bytes(self._incoming[_HEADER.size : end])
        del self._incoming[:end]
        try:
            message = json.loads(data)
        except (ValueError, RecursionError):
            raise MessageError("the other side sent a message that is not JSON") from None
        if not isinstance(message, dict):
            raise MessageError("the other side sent JSON that is not a message: expected an object")
        return message

    def _flush(self) -> None:
        while self._outgoing and not self._is_ended and self._socket is not None:
            try:
                chunk = bytes(self._outgoing[:_CHUNK])
                if self._descriptors_out:
                    count = socket.send_fds(self._socket, [chunk], self._descriptors_out)
                    self._descriptors_out = []
                else:
                    count = self._socket.send(chunk)
                del self._outgoing[:count]
            except BlockingIOError:
                return
            except OSError:
                self._outgoing.clear()  # received messages can still be read
                return

    def _fill(self) -> None:
        if self._socket is None:
            return
        room = socket.CMSG_SPACE(_MAX_DESCRIPTORS * _DESCRIPTOR_BYTES)
        try:
            data, ancillary, flags, _ = self._socket.recvmsg(_CHUNK, room, _CLOSE_ON_EXEC)
        except BlockingIOError:
            return
        except OSError:
            data, ancillary, flags = b"", [], 0
        received: list[int] = []
        for level, kind, content in ancillary:
            if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
                numbers = array.array("i")
                usable = len(content) - len(content) % _DESCRIPTOR_BYTES
                numbers.frombytes(content[:usable])
                received += numbers
        if len(received) > self.descriptors_wanted or flags & socket.MSG_CTRUNC:
            _close_all(received)
            raise TransferError(
                "the other side sent unexpected file descriptors: expected up to "
                f"{self.descriptors_wanted}"
            )
        self.descriptors_wanted -= len(received)
        self._descriptors_in += received
        self._is_ended = self._is_ended or not data
        self._incoming += data


def _close_all(descriptors: list[int]) -> None:
    while descriptors:
        with contextlib.suppress(OSError):
            os.close(descriptors.pop())
