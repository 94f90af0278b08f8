# SPDX-License-Identifier: Apache-2.0
"""The folder of compiled files: its owner and permissions, its locks, and its size."""

from __future__ import annotations

import atexit
import contextlib
import fcntl
import os
import re
import shutil
import tempfile
import time
import warnings
from collections.abc import Iterator
from pathlib import Path

_FOLDER, _LIMIT = "TVM_PAGEDKV_CACHE", "TVM_PAGEDKV_CACHE_MAX_MIB"
_DEFAULT_LIMIT_MIB = 4096
_MIN_IDLE_S = 3600  # a program may be about to load or link a file that it has just found
_BUILD = ".build-"
_FILE_NAME = re.compile(r"[0-9a-f]{32}\.\w+")  # nothing else in the folder may be removed

_private_folders: dict[int, Path] = {}  # by process id, because a fork may outlive its parent
_warned: dict[str, object] = {}


class UntrustedError(PermissionError):
    """A path could hold another user's code; the message says why."""


def cache_dir() -> Path:
    """Return the folder of compiled files.

    It is ``$TVM_PAGEDKV_CACHE``, or ``tvm_pagedkv`` in ``$XDG_CACHE_HOME`` (default: ``~/.cache``).
    """
    chosen = os.environ.get(_FOLDER)
    if chosen:
        return Path(chosen).expanduser()
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "tvm_pagedkv"


def max_bytes() -> int:
    """Return the size limit of the folder: ``$TVM_PAGEDKV_CACHE_MAX_MIB``, or 4 GiB.

    Raises
    ------
    ValueError
        If the variable is not a positive integer.
    """
    chosen = os.environ.get(_LIMIT) or str(_DEFAULT_LIMIT_MIB)
    if not re.fullmatch("[0-9]+", chosen) or int(chosen) == 0:
        raise ValueError(f"{_LIMIT} must be a positive integer, in MiB; got {chosen!r}")
    return int(chosen) * 2**20


def folders() -> list[Path]:
    """Return the folders that may hold compiled files for this process."""
    private = _private_folders.get(os.getpid())
    return [cache_dir()] + ([private] if private else [])


def require_trusted(path: Path) -> None:
    """Refuse a file or folder that another user owns (except root) or can write to.

    Raises
    ------
    UntrustedError
        If another user owns it or can write to it.
    FileNotFoundError
        If there is none.
    """
    status = path.stat()
    if status.st_uid not in (os.geteuid(), 0):
        raise UntrustedError(
            f"{path} belongs to user {status.st_uid}, and the process runs as user {os.geteuid()}"
        )
    if status.st_mode & 0o022:
        raise UntrustedError(
            f"other users may write to {path} (mode {status.st_mode & 0o7777:o}); if its files "
            f"are yours alone, run: chmod -R go-w {path}"
        )


@contextlib.contextmanager
def building(name: str) -> Iterator[tuple[Path, Path]]:
    """Lock a file while it is built. Other processes that build it wait.

    Parameters
    ----------
    name : str
        The file's name.

    Yields
    ------
    folder : Path
        The file's folder: `cache_dir`, or a private folder if `cache_dir` cannot be written or is
        not trusted. The latter is removed when the process ends, and a warning says why it is used.
    scratch : Path
        An empty folder on the same file system, removed on exit.
    """
    folder = cache_dir()
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        require_trusted(folder)
        with contextlib.suppress(FileNotFoundError):
            require_trusted(folder / name)
        lock = _lock(folder / (_BUILD + name))
    except OSError as error:
        _warn_once(f"compiled kernels are kept for this process only: {error}")
        folder = _private_folder()
        lock = _lock(folder / (_BUILD + name))
    scratch = folder / (_BUILD + name)
    try:
        shutil.rmtree(scratch, ignore_errors=True)  # left by a killed build
        scratch.mkdir(mode=0o700)
        yield folder, scratch
    finally:
        _unlock(scratch, lock)


def sweep(folder: Path, limit: int) -> None:
    """Remove leftovers of killed builds, and the least recently used files beyond `limit` bytes.

    The modification time of a file is its last use; `disk_cache` sets it.
    """
    files = []
    with os.scandir(folder) as entries:  # one system call per file: every build ends with a sweep
        for entry in entries:
            if entry.name.startswith(_BUILD):
                scratch = folder / entry.name.removesuffix(".lock")
                with contextlib.suppress(OSError):
                    _unlock(scratch, _lock(scratch, wait=False))
            elif _FILE_NAME.fullmatch(entry.name):
                with contextlib.suppress(FileNotFoundError):
                    status = entry.stat()
                    files.append((status.st_mtime, status.st_size, entry.path))
    excess = sum(num_bytes for _, num_bytes, _ in files) - limit
    newest = time.time() - _MIN_IDLE_S
    for used, num_bytes, path in sorted(files):
        if excess <= 0 or used > newest:
            break
        with contextlib.suppress(FileNotFoundError):
            os.unlink(path)
        excess -= num_bytes


def _lock(scratch: Path, wait: bool = True) -> int:
    """Take a build's lock, which ends with the process, and return its descriptor.

    Raises
    ------
    BlockingIOError
        If another process has it and `wait` is false.
    """
    path = _lock_path(scratch)
    while True:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
            # The previous owner may have removed the file, and then this lock is void.
            with contextlib.suppress(FileNotFoundError):
                if os.path.samestat(os.fstat(descriptor), path.stat()):
                    return descriptor
        except BaseException:
            os.close(descriptor)
            raise
        os.close(descriptor)


def _unlock(scratch: Path, descriptor: int) -> None:
    shutil.rmtree(scratch, ignore_errors=True)
    _lock_path(scratch).unlink(missing_ok=True)
    fcntl.flock(descriptor, fcntl.LOCK_UN)  # a forked process may hold the descriptor too
    os.close(descriptor)


def _lock_path(scratch: Path) -> Path:
    return scratch.with_name(scratch.name + ".lock")


def _private_folder() -> Path:
    """Return a folder of this process, which is removed when it ends."""
    process = os.getpid()
    if process not in _private_folders:
        made = Path(tempfile.mkdtemp(prefix="tvm_pagedkv-"))
        atexit.register(_remove_folder, made, process)
        _private_folders.setdefault(process, made)
    return _private_folders[process]


def _remove_folder(folder: Path, process: int) -> None:
    """Remove a private folder, unless this is a fork of the process that made it."""
    if os.getpid() == process:
        shutil.rmtree(folder, ignore_errors=True)


def _warn_once(text: str) -> None:
    if _warned.setdefault("folder", text) is text:
        warnings.warn(text, RuntimeWarning, stacklevel=3)
