# SPDX-License-Identifier: Apache-2.0
"""Authenticated connections: `connect`, and `Listener` for the side that waits."""

from __future__ import annotations

import contextlib
import errno
import logging
import math
import os
import selectors
import socket
from collections.abc import Iterator
from typing import Any

from . import clock
from .addresses import Address, check_peer, check_socket, describe, is_path, resolve, socket_path
from .authentication import Handshake, secret_for
from .channel import (
    AuthenticationError,
    ChannelClosed,
    TransferError,
    TransferTimeout,
    close_in_children,
)

HANDSHAKE_SECONDS = 5.0
RESOLVE_SECONDS = 30.0
_RETRY_SECONDS = 0.01
_MAX_HANDSHAKES = 64  # at a time
# EAGAIN: the backlog of a Unix socket is full. ENOTCONN: the peer accepted and closed at once.
_NOBODY_YET = (errno.ENOENT, errno.ECONNREFUSED, errno.EAGAIN, errno.ENOTCONN)

_log = logging.getLogger("tvm_pagedkv.transfer")


def connect(address: Address, timeout: float, secret: bytes | None) -> socket.socket:
    """Connect to a `Listener`, and wait until there is one.

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
    AuthenticationError
        If the peer runs as another user or does not know the secret.
    TransferError
        If the address cannot be reached; a `TransferTimeout` if nobody listens there in time.
    """
    local = is_path(address)
    secret = secret_for(secret, is_required=not local)
    end = clock.now() + timeout
    targets: list[tuple[int, Any]] = [(socket.AF_UNIX, address)]
    if isinstance(address, tuple):
        targets = resolve(address, timeout)
    connection = None
    while connection is None:
        connection, errors = _try_all(targets, end)
        text = " and ".join(error.strerror or str(error) for error in errors)
        if connection is None and not any(error.errno in _NOBODY_YET for error in errors):
            raise TransferError(f"cannot connect to {describe(address)}: {text}")
        if connection is None and clock.now() >= end:
            raise TransferTimeout(
                f"nobody listens at {describe(address)} within {timeout:g} s: {text}"
            )
        if connection is None:
            clock.sleep(min(_RETRY_SECONDS, max(0.0, end - clock.now())))
    with _closing_on_error(connection):
        if local:
            check_peer(connection)
        if secret is not None:
            left = max(0.0, end - clock.now())
            connection = Handshake(connection, secret, is_listener=False, seconds=left).run()
    return connection


class Listener:
    """Listens at an address and makes a channel for each authenticated peer.

    Handshakes run concurrently and have a time limit, so strangers do not delay other peers. A
    listener is a context manager that closes it.

    Parameters
    ----------
    channel_type : type
        Class of the channels: `SharedMemoryChannel` or `NixlChannel`.
    address : path or (host, port)
        The path must not exist. It is created for this user only, and removed by `close`. Port 0
        means any free port.
    secret : bytes, optional
        A shared secret of at least 16 bytes. A TCP address needs one; None then means the
        environment variable ``TVM_PAGEDKV_TRANSFER_SECRET``.
    handshake_seconds : float
        Time limit of a handshake.
    **options
        Keyword arguments of `channel_type`.

    Raises
    ------
    TypeError, ValueError
        If the address or the secret is invalid.
    TransferError
        If listening fails, or other users can write to the folder of the path.
    """

    def __init__(
        self,
        channel_type: type,
        address: Address,
        secret: bytes | None = None,
        handshake_seconds: float = HANDSHAKE_SECONDS,
        **options: Any,
    ) -> None:
        self._path: str | None = None
        self._pending: dict[socket.socket, Handshake] = {}
        local = is_path(address)
        self._secret = secret_for(secret, is_required=not local)
        self._type, self._options = channel_type, options
        self._handshake_seconds = handshake_seconds
        try:
            family: int
            if isinstance(address, tuple):
                family, target = resolve(address, RESOLVE_SECONDS)[0]
            else:
                family, target = socket.AF_UNIX, socket_path(address)
            self._socket = socket.socket(family, socket.SOCK_STREAM)
            with _closing_on_error(self._socket):
                self._bind(target)
        except OSError as error:
            if isinstance(error, TransferError):
                raise
            hint = ""
            if local and error.errno == errno.EADDRINUSE:
                hint = "; remove it if the process that made it has ended"
            raise TransferError(f"cannot listen at {describe(address)}: {error}{hint}") from None
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._socket, selectors.EVENT_READ)
        close_in_children(self)

    @property
    def address(self) -> Address:
        """The address that peers connect to: a path or (host, port)."""
        return self._path or self._socket.getsockname()[:2]

    def accept(self, timeout: float | None = 30.0) -> Any:
        """Wait for the next authenticated peer.

        Peers that fail the handshake are rejected and logged to ``tvm_pagedkv.transfer``.

        Parameters
        ----------
        timeout : float, optional
            Seconds; None: no limit.

        Returns
        -------
        Channel
            An instance of `channel_type`.

        Raises
        ------
        TransferTimeout
            If no peer comes in time; its cause is the error of the last rejected one.
        TransferError
            If the listener is closed.
        """
        end = math.inf if timeout is None else clock.now() + timeout
        refused: TransferError | None = None
        while True:
            if self._socket.fileno() < 0:
                raise TransferError("the listener is closed")
            limits = [handshake.end for handshake in self._pending.values()]
            limit = min([end, *limits])
            left = None if limit == math.inf else max(0.0, limit - clock.now())
            events = clock.wait(self._selector, left)
            for key, _ in events:
                try:
                    connection = self._advance(key.fileobj)
                except (AuthenticationError, ChannelClosed) as error:
                    refused = error
                    _log.warning("rejected a connection to %s: %s", self._where(), error)
                    continue
                if connection is not None:
                    with _closing_on_error(connection):
                        return self._type(connection, **self._options)
            refused = self._drop_silent() or refused
            if not events and clock.now() >= end:
                text = f"no authenticated peer connected to {self._where()} within {timeout:g} s"
                if refused is not None:
                    text += f"; last rejection: {refused}"
                raise TransferTimeout(text) from refused

    def close(self) -> None:
        """Stop listening. Channels stay open. Repeated calls do nothing."""
        if self._socket.fileno() < 0:
            return
        self._remove_path()
        for connection in list(self._pending):
            self._forget(connection).connection.close()
        self.abandon()

    def abandon(self) -> None:
        """Close what a forked child has of its parent's listener, which goes on."""
        for connection in self._pending:
            connection.close()
        self._pending.clear()
        self._selector.close()
        self._socket.close()

    def __enter__(self) -> Listener:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    # --- inside ---------------------------------------------------------------------------------

    def _bind(self, target: Any) -> None:
        if self._socket.family == socket.AF_UNIX:
            os.fchmod(self._socket.fileno(), 0o600)  # bind makes the path with this mode
        else:
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self._socket.bind(target)
        if self._socket.family == socket.AF_UNIX:
            self._path = target
        self._socket.listen(_MAX_HANDSHAKES)
        self._socket.setblocking(False)

    def _where(self) -> str:
        return describe(self.address)

    def _advance(self, ready: Any) -> socket.socket | None:
        """Accept a connection or advance its handshake; return it once it is authenticated."""
        if ready is not self._socket:
            handshake = self._pending.get(ready)
            if handshake is None:
                return None  # closed to make room for another one
            try:
                if not handshake.advance():
                    return None
            except TransferError:
                self._forget(ready).connection.close()
                raise
            self._forget(ready)
            return handshake.finish()
        try:
            connection, _ = self._socket.accept()
        except OSError as error:
            if error.errno in (errno.EAGAIN, errno.ECONNABORTED, errno.EINTR):
                return None  # the peer is gone already
            raise TransferError(f"cannot accept a connection: {error}") from None
        with _closing_on_error(connection):
            if connection.family == socket.AF_UNIX:
                check_peer(connection)
            if self._secret is None:
                return connection
            if len(self._pending) >= _MAX_HANDSHAKES:  # make room for a faster one
                oldest = next(iter(self._pending))
                self._forget(oldest).connection.close()
            seconds = self._handshake_seconds
            self._pending[connection] = Handshake(connection, self._secret, True, seconds)
            self._selector.register(connection, selectors.EVENT_READ)
        return None

    def _drop_silent(self) -> TransferError | None:
        error = None
        for connection, handshake in list(self._pending.items()):
            if handshake.end <= clock.now():
                error = handshake.timeout()
                _log.warning("rejected a connection to %s: %s", self._where(), error)
                self._forget(connection).connection.close()
        return error

    def _forget(self, connection: socket.socket) -> Handshake:
        self._selector.unregister(connection)
        return self._pending.pop(connection)

    def _remove_path(self) -> None:
        if self._path is not None:
            with contextlib.suppress(OSError):
                os.unlink(self._path)


def _try_all(
    targets: list[tuple[int, Any]], end: float
) -> tuple[socket.socket | None, list[OSError]]:
    """Return the first connection that a target accepts, or the error of each target."""
    errors: list[OSError] = []
    for family, target in targets:
        try:
            return _try(family, target, max(0.001, end - clock.now())), errors
        except TimeoutError as error:
            errors.append(OSError(errno.EAGAIN, str(error)))
        except OSError as error:
            errors.append(error)
    return None, errors


def _try(family: int, target: Any, timeout: float) -> socket.socket:
    """Try once to connect."""
    if family == socket.AF_UNIX:
        target = socket_path(target)
        check_socket(target)
    connection = socket.socket(family, socket.SOCK_STREAM)
    with _closing_on_error(connection), selectors.DefaultSelector() as selector:
        connection.setblocking(False)
        error = connection.connect_ex(target)
        if error == errno.EINPROGRESS:
            selector.register(connection, selectors.EVENT_WRITE)
            if not clock.wait(selector, timeout):
                raise TimeoutError("timed out")
            error = connection.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
        if error:
            raise OSError(error, os.strerror(error))
        if family != socket.AF_UNIX and connection.getsockname() == connection.getpeername():
            # TCP can connect a free port of this host to itself if it picks it for both ends.
            raise ConnectionRefusedError(errno.ECONNREFUSED, os.strerror(errno.ECONNREFUSED))
    return connection


@contextlib.contextmanager
def _closing_on_error(connection: socket.socket) -> Iterator[None]:
    try:
        yield
    except BaseException:
        connection.close()
        raise
