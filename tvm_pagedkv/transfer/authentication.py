# SPDX-License-Identifier: Apache-2.0
"""The handshake of TCP connections: both sides prove that they know a secret without sending it.

    listener                                   connector
    "tvm_pagedkv 1\\n", nonce L (32 bytes)  ->
                                           <-  nonce C, HMAC(secret, "connector" + L + C)
    HMAC(secret, "listener" + L + C)       ->  or 32 zero bytes: refused

It differs from the handshake of `multiprocessing.connection` in two ways. It uses SHA-256 instead
of MD5, and the digest contains the role: otherwise a stranger could answer a challenge with the
digest that a side computes in a second connection. All sizes are fixed, so a stranger cannot make
either side buffer more than a hundred bytes.
"""

from __future__ import annotations

import hmac
import os
import selectors
import socket
from collections.abc import Generator

from . import clock
from .channel import AuthenticationError, ChannelClosed, TransferTimeout

SECRET_VARIABLE = "TVM_PAGEDKV_TRANSFER_SECRET"
MIN_SECRET_BYTES = 16

_MAGIC = b"tvm_pagedkv 1\n"
_NONCE_BYTES = _DIGEST_BYTES = 32
_REFUSED = bytes(_DIGEST_BYTES)

# A generator that yields (bytes to send, number of bytes to receive) and is sent the latter.
Steps = Generator[tuple[bytes, int], bytes, None]


def secret_for(secret: bytes | None, is_required: bool) -> bytes | None:
    """Return the secret from an argument or, if one is required, from the environment.

    Raises
    ------
    TypeError
        If the argument is not bytes.
    ValueError
        If a required secret is missing, or the secret is too short.
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
    if not isinstance(secret, bytes):  # the error must not contain the value
        raise TypeError(f"secret must be bytes, got {type(secret).__name__}")
    if len(secret) < MIN_SECRET_BYTES:
        raise ValueError(
            f"{origin} must have at least {MIN_SECRET_BYTES} bytes, got {len(secret)}: "
            "a short secret can be found from a recorded handshake"
        )
    return secret


class AuthenticatedSocket(socket.socket):
    """A TCP socket whose peer has proved that it knows the secret; made by `Handshake` only."""


class Handshake:
    """The handshake on one connection, which advances as bytes arrive.

    Parameters
    ----------
    connection : socket.socket
        The handshake owns it until `finish`.
    secret : bytes
    is_listener : bool
        The role of this side.
    seconds : float
        Time limit of the whole handshake.
    """

    def __init__(
        self, connection: socket.socket, secret: bytes, is_listener: bool, seconds: float
    ) -> None:
        connection.setblocking(False)
        self.connection, self.end = connection, clock.now() + seconds
        self._seconds, self._is_listener = seconds, is_listener
        self._steps = (_listen if is_listener else _connect)(secret)
        self._received = b""
        data, self._wanted = next(self._steps)
        self._send(data)

    def advance(self) -> bool:
        """Handle the bytes that have arrived; return whether the handshake has succeeded.

        Raises
        ------
        AuthenticationError, ChannelClosed
            If it has failed.
        """
        while True:
            try:
                # Never more than expected: the bytes that follow are messages.
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
        """Wait until the handshake has succeeded, and return the connection.

        Raises
        ------
        AuthenticationError, ChannelClosed, TransferTimeout
            If it fails, or takes too long.
        """
        with selectors.DefaultSelector() as selector:
            selector.register(self.connection, selectors.EVENT_READ)
            while not self.advance():
                if not clock.wait(selector, max(0.0, self.end - clock.now())):
                    raise self.timeout()
        return self.finish()

    def finish(self) -> socket.socket:
        """Return the connection, which the caller owns from now on."""
        if self.connection.family == socket.AF_UNIX:
            return self.connection
        return AuthenticatedSocket(fileno=self.connection.detach())

    def timeout(self) -> TransferTimeout:
        """Return the error of a handshake that takes too long."""
        return TransferTimeout(f"the other side did not prove itself within {self._seconds:g} s")

    def _refuse(self) -> None:
        try:
            self.connection.send(_REFUSED)
        except OSError:
            pass  # the peer is gone

    def _send(self, data: bytes) -> None:
        try:
            sent = self.connection.send(data) if data else 0
        except OSError:
            sent = -1
        if sent != len(data):  # a new connection buffers a hundred bytes
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
        raise AuthenticationError("the other side does not authenticate")
    theirs, ours = greeting[len(_MAGIC) :], os.urandom(_NONCE_BYTES)
    digest = yield ours + _digest(secret, b"connector", theirs, ours), _DIGEST_BYTES
    _check(digest, _digest(secret, b"listener", theirs, ours))


def _digest(secret: bytes, role: bytes, listener: bytes, connector: bytes) -> bytes:
    return hmac.digest(secret, role + listener + connector, "sha256")


def _check(digest: bytes, expected: bytes) -> None:
    if not hmac.compare_digest(digest, expected):
        raise AuthenticationError("the two sides do not have the same secret")
