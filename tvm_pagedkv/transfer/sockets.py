# SPDX-License-Identifier: Apache-2.0
"""`SocketChannel`: messages as JSON over a stream socket, for channels between processes."""

from __future__ import annotations

import array
import contextlib
import json
import os
import selectors
import socket
import struct
import time
from pathlib import Path
from typing import Any

from .channel import Channel, ChannelClosed, TransferError, TransferTimeout

_HEADER = struct.Struct("<I")  # bytes of the message that follows
_MAX_MESSAGE = 1 << 26
_CHUNK = 1 << 18
_MAX_DESCRIPTORS = 4
_DESCRIPTOR_BYTES = array.array("i").itemsize

Address = str | os.PathLike | tuple[str, int]


class SocketChannel(Channel):
    """A channel whose messages go over a socket.

    The end of a process closes its sockets, so the other side knows at once.

    Parameters
    ----------
    connection : socket.socket
        A connected stream socket; the channel owns it from now on.
    """

    def __init__(self, connection: socket.socket) -> None:
        connection.setblocking(False)
        self._socket: socket.socket | None = connection
        self._incoming, self._outgoing = bytearray(), bytearray()
        self._is_ended = False
        self._descriptors_out: list[int] = []  # go with the next bytes
        self._descriptors_in: list[int] = []
        self._selector = selectors.DefaultSelector()
        self._selector.register(connection, selectors.EVENT_READ)

    @classmethod
    def listen(cls, address: Address, timeout: float = 30.0, **options: Any):
        """Wait for the other side at a path of the file system or at (host, port).

        A path must not exist; it is there until the other side has come, for this user only.
        """
        family, target = _resolve(address)
        with socket.socket(family, socket.SOCK_STREAM) as server:
            if family != socket.AF_UNIX:
                server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            server.bind(target)
            try:
                if family == socket.AF_UNIX:
                    os.chmod(target, 0o600)
                server.listen(1)
                server.settimeout(timeout)
                try:
                    connection, _ = server.accept()
                except TimeoutError:
                    raise TransferTimeout(f"nobody came to {target} in {timeout} s") from None
            finally:
                if family == socket.AF_UNIX:
                    os.unlink(target)
        return cls(connection, **options)

    @classmethod
    def connect(cls, address: Address, timeout: float = 30.0, **options: Any):
        """Connect to the side that listens, as soon as it does."""
        family, target = _resolve(address)
        end = time.monotonic() + timeout
        while True:
            connection = socket.socket(family, socket.SOCK_STREAM)
            try:
                connection.connect(target)
                return cls(connection, **options)
            except (FileNotFoundError, ConnectionRefusedError):
                connection.close()
                if time.monotonic() > end:
                    raise TransferTimeout(f"nobody listens at {target}") from None
                time.sleep(0.01)

    def send(self, message: dict[str, Any]) -> None:
        if self._socket is None:
            raise ChannelClosed("the channel is closed")
        data = json.dumps(message, separators=(",", ":"), allow_nan=True).encode()
        if len(data) > _MAX_MESSAGE or len(self._outgoing) > _MAX_MESSAGE:
            raise TransferError(f"a message of {len(data)} bytes does not fit into the channel")
        self._outgoing += _HEADER.pack(len(data)) + data
        self._flush()

    def receive(self, timeout: float) -> dict[str, Any] | None:
        end = time.monotonic() + timeout
        while True:
            message = self._next_message()
            if message is not None:
                return message
            if self._socket is None or self._is_ended:
                raise ChannelClosed("the other side has closed the channel, or its process is gone")
            self._flush()
            events = selectors.EVENT_READ | (selectors.EVENT_WRITE if self._outgoing else 0)
            self._selector.modify(self._socket, events)
            if not self._selector.select(max(0.0, end - time.monotonic())):
                return None
            self._fill()

    def close(self) -> None:
        if self._socket is None:
            return
        with contextlib.suppress(TransferError):
            self._flush()
        self._selector.close()
        self._socket.close()
        self._socket = None
        for descriptor in self._descriptors_in:
            os.close(descriptor)
        self._descriptors_in.clear()

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
            return json.loads(data)
        except (ValueError, RecursionError):
            raise TransferError("the other side sent a message that is no JSON") from None

    def _flush(self) -> None:
        while self._outgoing and not self._is_ended:
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
                self._outgoing.clear()  # what has come from there can still be read
                return

    def _fill(self) -> None:
        room = socket.CMSG_SPACE(_MAX_DESCRIPTORS * _DESCRIPTOR_BYTES)
        try:
            data, ancillary, _, _ = self._socket.recvmsg(_CHUNK, room)
        except BlockingIOError:
            return
        except OSError:
            data, ancillary = b"", []
        for level, kind, content in ancillary:
            if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
                received = array.array("i")
                usable = len(content) - len(content) % _DESCRIPTOR_BYTES
                received.frombytes(content[:usable])
                self._descriptors_in += received
        self._is_ended = self._is_ended or not data
        self._incoming += data


def _resolve(address: Address) -> tuple[int, Any]:
    if isinstance(address, tuple):
        host, port = address
        return socket.AF_INET, (host, int(port))
    return socket.AF_UNIX, str(Path(address))
