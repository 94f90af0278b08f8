# SPDX-License-Identifier: Apache-2.0
"""Addresses of listeners, Unix socket paths or TCP addresses, and checks of their owners."""

from __future__ import annotations

import os
import socket
import stat
import struct
import threading
from pathlib import Path
from typing import Any

from .channel import AuthenticationError, TransferError, TransferTimeout

Address = str | os.PathLike | tuple[str, int]

_CREDENTIALS = struct.Struct("3i")  # struct ucred: pid, uid, gid
_MAX_PATH_BYTES = 107  # of sockaddr_un, without the terminating zero


def is_path(address: Address) -> bool:
    """Return whether an address is the path of a Unix socket; otherwise it is (host, port).

    Raises
    ------
    TypeError, ValueError
        If it is neither.
    """
    if isinstance(address, (str, os.PathLike)):
        path = os.fspath(address)
        if not isinstance(path, str) or not path or "\0" in path:
            raise ValueError(f"expected the path of a Unix socket, got {path!r}")
        return True
    if not isinstance(address, tuple) or len(address) != 2:
        raise TypeError(f"an address is a path or (host, port), got {address!r}")
    host, port = address
    if not isinstance(host, str) or not isinstance(port, int) or isinstance(port, bool):
        raise TypeError(f"expected a host's name and an integer port, got {address!r}")
    if not 0 <= port < 1 << 16:
        raise ValueError(f"a port is in [0, 65536), got {port}")
    return False


def resolve(address: tuple[str, int], timeout: float) -> list[tuple[int, Any]]:
    """Resolve the name of a host.

    Returns
    -------
    list of (family, address)
        Socket family and socket address of each IP address.

    Raises
    ------
    TransferError
        If the host is unknown; a `TransferTimeout` if the name service does not answer in time.
    """
    found: list[Any] = []

    def ask(flags: int = 0) -> None:
        try:
            found.append(socket.getaddrinfo(*address, type=socket.SOCK_STREAM, flags=flags))
        except (OSError, UnicodeError) as error:
            found.append(error)

    ask(socket.AI_NUMERICHOST)  # no query for a numeric address
    if isinstance(found[0], Exception):
        found.clear()
        # getaddrinfo has no time limit, so it runs in a thread.
        thread = threading.Thread(target=ask, name="tvm_pagedkv resolve", daemon=True)
        thread.start()
        thread.join(max(0.0, timeout))
    if not found:
        raise TransferTimeout(f"the name of {describe(address)} was not resolved in {timeout:g} s")
    if isinstance(found[0], Exception):
        raise TransferError(f"cannot resolve {describe(address)}: {found[0]}")
    return [(family, target) for family, _, _, _, target in found[0]]


def describe(address: Address) -> str:
    """Return the address as text for an error."""
    if isinstance(address, tuple):
        return f"{address[0]}:{address[1]}"
    return os.fspath(address)


def socket_path(address: str | os.PathLike) -> str:
    """Resolve the links in the folder of a Unix socket's path.

    Raises
    ------
    OSError
        If the folder does not exist.
    TransferError
        If another user could create or remove a socket there.
    """
    path = Path(os.fspath(address)).absolute()
    try:
        folder = path.parent.resolve(strict=True)
    except RuntimeError as error:  # a cycle of links; an OSError from Python 3.13 on
        raise TransferError(f"cannot use a Unix socket at {path}: {error}") from None
    for each in (folder, *folder.parents):
        _check_folder(each, holds_socket=each == folder)
    resolved = str(folder / path.name)
    if len(os.fsencode(resolved)) > _MAX_PATH_BYTES:
        raise TransferError(
            f"the path of a Unix socket has up to {_MAX_PATH_BYTES} bytes: {resolved}"
        )
    return resolved


def check_socket(path: str) -> None:
    """Check that a path is a socket of this user or of root.

    Raises
    ------
    FileNotFoundError
        If the path does not exist yet.
    TransferError
        If it is not a socket, has another owner, or lets other users connect.
    """
    status = os.lstat(path)
    if not stat.S_ISSOCK(status.st_mode):
        raise TransferError(f"{path} is not a socket")
    _check_owner(path, status.st_uid)
    if status.st_mode & 0o077:
        mode = stat.S_IMODE(status.st_mode)
        raise TransferError(f"other users may connect to {path}: its mode is {mode:03o}, not 600")


def check_peer(connection: socket.socket) -> None:
    """Check that the peer of a Unix socket runs as this user or as root.

    Raises
    ------
    AuthenticationError
        If it runs as another user.
    """
    packed = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    process, user, _ = _CREDENTIALS.unpack(packed)
    if user not in (0, os.geteuid()):
        raise AuthenticationError(
            f"the other side (process {process}) is of user {user}, "
            f"expected user {os.geteuid()} or root"
        )


def _check_folder(folder: Path, holds_socket: bool) -> None:
    status = folder.stat()
    _check_owner(folder, status.st_uid)
    # In a sticky folder such as /tmp, other users can add entries but not rename those of others.
    is_sticky = bool(status.st_mode & stat.S_ISVTX) and not holds_socket
    if status.st_mode & 0o022 and not is_sticky:
        raise TransferError(
            f"other users may write to {folder} (mode {stat.S_IMODE(status.st_mode):04o}); "
            "a Unix socket needs a folder that only its user may write to"
        )


def _check_owner(path: Any, owner: int) -> None:
    if owner not in (0, os.geteuid()):
        raise TransferError(f"{path} belongs to user {owner}, expected user {os.geteuid()} or root")
