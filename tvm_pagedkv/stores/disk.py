# SPDX-License-Identifier: Apache-2.0
"""`DiskStore`: pages of prefixes in a folder on a local disk."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import logging
import os
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from .._checks import check_int, check_positive
from .disk_index import DiskIndex, Found
from .disk_layout import MIN_BYTES, Layout, allocate, open_data, open_index, prepare_folder
from .disk_slots import Piece, SlotFile, slot_bytes_of
from .memory import check_batch, check_keys

_log = logging.getLogger(__name__)
_LOCK_POLL_SECONDS = 0.001
_CLOSE_SECONDS = 1.0


class DiskStore:
    """A store of pages in a folder on a local disk, limited in size, shared by processes.

    The least recently used values make room for new ones. Values survive the process, a kill at
    any moment and, verified by checksums, a loss of power. Where the file system supports
    O_DIRECT, data bypasses the page cache. Addresses that are multiples of 4096 save a copy.

    Several processes, and several stores in a process, may use a folder at the same time. A store
    cannot be used after a fork: the child opens its own.

    Parameters
    ----------
    path : str or path
        The folder; created with mode 0700, its files with mode 0600, because K and V tell what
        prompts say.
    max_bytes : int
        Limit of the data on disk, at least 1 MiB. The index takes another 0.25 %. A folder keeps
        the limit that it was created with. A value may have up to a 16th of it, at most 64 MiB.
    num_threads : int
        Threads that read and write.
    lock_seconds : float
        How long a call waits for another process that changes the index.

    Raises
    ------
    OSError
        If the folder or its files cannot be created, read or written.
    PermissionError
        If other users can access the folder.
    ValueError
        If the folder has something else, or a store of another version or another `max_bytes`.

    Notes
    -----
    A value that the disk fails to read or write is a miss. A failure of the index raises an
    OSError, as does a call that cannot get the lock; the cache takes both for misses. A damaged
    value is removed when it is found.
    """

    verifies_values = True

    def __init__(
        self,
        path: str | os.PathLike[str],
        max_bytes: int = 16 << 30,
        *,
        num_threads: int = 4,
        lock_seconds: float = 5.0,
    ) -> None:
        layout = Layout(check_int("max_bytes", max_bytes, MIN_BYTES, 2**48))
        check_int("num_threads", num_threads, 1, 64)
        self._lock_seconds = check_positive("lock_seconds", lock_seconds)
        self._path = Path(path).absolute()
        self._process = os.getpid()
        self._call = threading.Lock()
        self._is_closed = False
        prepare_folder(self._path)
        with contextlib.ExitStack() as opened:
            self._lock_file = os.open(
                self._path / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600
            )
            opened.callback(os.close, self._lock_file)
            with self._locked():
                self._index_file = open_index(self._path, layout)
                opened.callback(os.close, self._index_file)
                data = open_data(self._path)
            self._slots = SlotFile(data, num_threads)
            opened.callback(self._slots.close)
            self._index = DiskIndex(
                self._index_file,
                layout,
                lambda offset, size: allocate(data, offset, size, self._path / "data.bin"),
            )
            self._opened = opened.pop_all()

    def exists(self, keys: Sequence[bytes]) -> list[bool]:
        """Return for each key whether the index has it."""
        check_keys(keys)
        with self._using():
            return [found is not None for found in self._index.find(keys)]

    def get_into(
        self, keys: Sequence[bytes], addresses: Sequence[int], sizes: Sequence[int]
    ) -> list[bool]:
        """Read values to addresses; return for each whether it was read whole and undamaged."""
        check_batch(keys, addresses, sizes)
        with self._using():
            return self._get(keys, addresses, sizes)

    def _get(
        self, keys: Sequence[bytes], addresses: Sequence[int], sizes: Sequence[int]
    ) -> list[bool]:
        results = [False] * len(keys)
        hits: list[tuple[int, Found]] = []
        for i, found in enumerate(self._index.find(keys)):
            if found is not None and found.size == sizes[i]:
                hits.append((i, found))
        pieces = [_piece(found.offset, keys[i], addresses[i], sizes[i]) for i, found in hits]
        for (i, _), is_read in zip(hits, self._slots.read(pieces), strict=True):
            results[i] = is_read
        self._index.touch([found.slot for i, found in hits if results[i]])
        self._remove_damaged([(keys[i], found) for i, found in hits if not results[i]])
        return results

    def put_from(
        self, keys: Sequence[bytes], addresses: Sequence[int], sizes: Sequence[int]
    ) -> list[bool]:
        """Write values that the store does not have; return for each whether it has it now."""
        check_batch(keys, addresses, sizes)
        with self._using():
            return self._put(keys, addresses, sizes)

    def _put(
        self, keys: Sequence[bytes], addresses: Sequence[int], sizes: Sequence[int]
    ) -> list[bool]:
        found = self._index.find(keys)
        there = {
            keys[i]: f.slot for i, f in enumerate(found) if f is not None and f.size == sizes[i]
        }
        self._index.touch(list(there.values()))
        has = set(there)
        new = {key: i for i, key in enumerate(keys) if key not in has}  # one of equal keys
        with self._locked():
            slots = self._index.reserve([slot_bytes_of(sizes[i]) for i in new.values()])
        jobs = [
            (slot, _piece(slot.offset, key, addresses[i], sizes[i]))
            for slot, (key, i) in zip(slots, new.items(), strict=True)
            if slot is not None
        ]
        written = self._slots.write([piece for _, piece in jobs])
        done = [job for job, is_written in zip(jobs, written, strict=True) if is_written]
        with self._locked():
            for (slot, _), is_written in zip(jobs, written, strict=True):
                if not is_written:
                    self._index.release(slot)
            values = [(piece.key, piece.size, slot) for slot, piece in done]
            published = self._index.publish(values)
        has |= {key for (key, _, _), is_there in zip(values, published, strict=True) if is_there}
        if not all(written):
            _log.warning("%s: %d values could not be written", self._path, written.count(False))
        return [key in has for key in keys]

    def register(self, address: int, size: int) -> None:
        """Do nothing: a disk reads and writes any memory."""

    def close(self) -> None:
        """Close the files; closing again does nothing.

        If a call in another thread hangs, the files are closed when it returns.
        """
        self._is_closed = True
        if self._call.acquire(timeout=_CLOSE_SECONDS):
            try:
                self._opened.close()
            finally:
                self._call.release()

    def __enter__(self) -> DiskStore:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _remove_damaged(self, damaged: list[tuple[bytes, Found]]) -> None:
        """Remove values that could not be read, so that they are written again."""
        if not damaged:
            return
        removed = 0
        try:
            with self._locked():
                again = self._index.find([key for key, _ in damaged])
                for (key, before), now in zip(damaged, again, strict=True):
                    if now == before:  # otherwise another process has just replaced it
                        self._index.remove(key)
                        removed += 1
        except TimeoutError:  # the other values were read; a later call removes these
            return
        if removed:
            _log.warning("%s: %d values were damaged, and are removed", self._path, removed)

    @contextlib.contextmanager
    def _using(self) -> Iterator[None]:
        if os.getpid() != self._process:
            raise RuntimeError("a DiskStore cannot be used after a fork; open it in the child")
        with self._call:
            if self._is_closed:
                raise ValueError("the DiskStore is closed")
            try:
                yield
            finally:
                if self._is_closed:
                    self._opened.close()

    @contextlib.contextmanager
    def _locked(self) -> Iterator[None]:
        deadline = time.monotonic() + self._lock_seconds
        while True:
            try:
                fcntl.flock(self._lock_file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > deadline:
                    text = f"another process has had the lock for {self._lock_seconds} s"
                    raise TimeoutError(errno.ETIMEDOUT, text, str(self._path)) from None
                time.sleep(_LOCK_POLL_SECONDS)
        try:
            yield
        finally:
            fcntl.flock(self._lock_file, fcntl.LOCK_UN)


def _piece(offset: int, key: bytes, address: int, size: int) -> Piece:
    return Piece(offset, offset + slot_bytes_of(size), key, address, size)
