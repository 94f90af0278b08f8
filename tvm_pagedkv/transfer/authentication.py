# SPDX-License-Identifier: Apache-2.0
"""Both sides of a TCP connection prove that they know a shared secret, without sending it.

    listener                                   connector
    "tvm_pagedkv 1\\n", nonce L (32 bytes)  ->
                                           <-  nonce C, HMAC(secret, "connector" + L + C)
    HMAC(secret, "listener" + L + C)       ->  or 32 zero bytes: refused

This is the handshake of `multiprocessing.connection` with SHA-256 in place of MD5 (its digest up to
Python 3.11), and with the role in the digest: there, whoever can make a side connect twice gets the
answer to the first challenge from the second connection. All sizes are fixed, so a stranger cannot
make either side store more than a hundred bytes.
"""

from __future__ import annotations

import hmac
import os
import selectors
import socket
import time
from collections.abc import Generator

from .channel import AuthenticationError, ChannelClosed, TransferTimeout

SECRET_VARIABLE = "TVM_PAGEDKV_TRANSFER_SECRET"
MIN_SECRET_BYTES = 16

_MAGIC = b"tvm_pagedkv 1\n"
_NONCE_BYTES = _DIGEST_BYTES = 32
_REFUSED = bytes(_DIGEST_BYTES)

# Yields (bytes to send, number of bytes to wait for); is sent those.
Steps = Generator[tuple[bytes, int], bytes, None]


def secret_for(secret: bytes | None, is_required: bool) -> bytes | None:
    """The secret of an argument or, where one is required, of the environment.

    Raises
    ------
    TypeError
        If it is not bytes.
    ValueError
        If there is none although it is required, or if it is too short.
    """
    origin = "secret"
    if secret is None and is_required:
        origin = f"the environment variable {SECRET_VARIABLE}"
        secret = os.fsencode(os.environ.get(SECRET_VARIABLE, "")) or None
        if secret is None:
            raise ValueError(
                f"a TCP address needs a secret: give secret=... or set {SECRET_VARIABLE}"
            )
    if secret is None:
        return None
    if not isinstance(secret, bytes):  # its value must not get into an error
        raise TypeError(f"secret must be bytes, got {type(secret).__name__}")
    if len(secret) < MIN_SECRET_BYTES:
        raise ValueError(
            f"{origin} must have at least {MIN_SECRET_BYTES} bytes, got {len(secret)}: "
            "whoever records a handshake can try short ones"
        )
    return secret


class AuthenticatedSocket(socket.socket):
    """A TCP socket whose other side knows the secret; only `Handshake` makes one."""


class Handshake:
    """The handshake on one connection, as far as bytes have come.

    Parameters
    ----------
    connection : socket.socket
        The handshake owns it until `finish`.
    secret : bytes
    is_listener : bool
        Which of the two roles this side has.
    seconds : float
        Time limit of the whole handshake.
    """

    def __init__(
        self, connection: socket.socket, secret: bytes, is_listener: bool, seconds: float
    ) -> None:
        connection.setblocking(False)
        self.connection, self.end = connection, time.monotonic() + seconds
        self._seconds, self._is_listener = seconds, is_listener
        self._steps = (_listen if is_listener else _connect)(secret)
        self._received = b""
        data, self._wanted = next(self._steps)
        self._send(data)

    def advance(self) -> bool:
        """Handle the bytes that are there; returns whether the handshake has succeeded.

        Raises
        ------
        AuthenticationError, ChannelClosed
            It has failed.
        """
        while True:
            try:
                # Never more than is wanted: what follows are messages.
                data = self.connection.recv(self._wanted - len(self._received))
            except BlockingIOError:
                return False
            except OSError:
                data = b""
            if not data:
                raise ChannelClosed("the other side closed the connection during the handshake")
            self._received += data
            if len(self._received) < self._wanted:
                continue
            received, self._received = self._received, b""
            try:
                data, self._wanted = self._steps.send(received)
            except StopIteration:
                return True
            except AuthenticationError:
                if self._is_listener:
                    self._refuse()
                raise
            self._send(data)
            if not self._wanted:
                return True

    def run(self) -> socket.socket:
        """Wait until the handshake is done.

        Raises
        ------
        AuthenticationError, ChannelClosed, TransferTimeout
        """
        with selectors.DefaultSelector() as selector:
            selector.register(self.connection, selectors.EVENT_READ)
            while not self.advance():
                if not selector.select(max(0.0, self.end - time.monotonic())):
                    raise self.timeout()
        return self.finish()

    def finish(self) -> socket.socket:
        """The connection, which belongs to the caller now."""
        if self.connection.family == socket.AF_UNIX:
            return self.connection
        return AuthenticatedSocket(fileno=self.connection.detach())

    def timeout(self) -> TransferTimeout:
        """The error of a handshake that took too long."""
        return TransferTimeout(f"the other side did not prove itself within {self._seconds:g} s")

    def _refuse(self) -> None:
        try:
            self.connection.send(_REFUSED)
        except OSError:
            pass  # it is gone; there is nobody to tell

    def _send(self, data: bytes) -> None:
        try:
            sent = self.connection.send(data) if data else 0
        except OSError:
            sent = -1
        if sent != len(data):  # the first hundred bytes of a connection always fit
            raise ChannelClosed("the other side closed the connection during the handshake")


def _listen(secret: bytes) -> Steps:
    ours = os.urandom(_NONCE_BYTES)
    answer = yield _MAGIC + ours, _NONCE_BYTES + _DIGEST_BYTES
    theirs, digest = answer[:_NONCE_BYTES], answer[_NONCE_BYTES:]
    _check(digest, _digest(secret, b"connector", ours, theirs))
    yield _digest(secret, b"listener", ours, theirs), 0


def _connect(secret: bytes) -> Steps:
    greeting = yield b"", len(_MAGIC) + _NONCE_BYTES
    if not greeting.startswith(_MAGIC):
        raise AuthenticationError("the other side does not ask for a secret")
    theirs, ours = greeting[len(_MAGIC) :], os.urandom(_NONCE_BYTES)
    digest = yield ours + _digest(secret, b"connector", theirs, ours), _DIGEST_BYTES
    _check(digest, _digest(secret, b"listener", theirs, ours))


def _digest(secret: bytes, role: bytes, listener: bytes, connector: bytes) -> bytes:
    return hmac.digest(secret, role + listener + connector, "sha256")


def _check(digest: bytes, expected: bytes) -> None:
    if not hmac.compare_digest(digest, expected):
        raise AuthenticationError("the two sides do not have the same secret")
