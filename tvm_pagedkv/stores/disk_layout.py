# SPDX-License-Identifier: Apache-2.0
"""The layout of a `DiskStore`'s folder, and how it is created.

    lock       locked by whoever changes the index
    index.bin  header | clock | slab table | use of each slot | owner of each slot | buckets
    data.bin   slabs of slots

The data file is divided into slabs. A slab is unused, or has slots of one size. A bucket has 16
entries; an entry names a key, the size of its value and its slot. The clock counts batches, and the
use of a slot is the clock's value when the slot was last used; 0 means that the slot is free.
"""

from __future__ import annotations

import errno
import os
import stat
import struct
import zlib
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

VERSION = 1
MIN_SLOT_BYTES = 32 << 10
MAX_SLAB_BYTES = 64 << 20
MIN_BYTES = 1 << 20
BLOCK = 4096
BUCKET_ENTRIES = 16
ENTRY_BYTES = 64
BUCKET_BYTES = BUCKET_ENTRIES * ENTRY_BYTES

_HEADER = struct.Struct("<8sIIQQ")  # magic, version, zero, max_bytes, slab_bytes; a CRC-32 follows
_MAGIC = b"pkvstore"
_NAMES = {"lock", "index.bin", "index.new", "data.bin"}


@dataclass(frozen=True)
class Layout:
    """Offsets in the index file for a limit of data bytes."""

    max_bytes: int

    @cached_property
    def slab_bytes(self) -> int:
        return min(MAX_SLAB_BYTES, self.max_bytes // 16 // MIN_SLOT_BYTES * MIN_SLOT_BYTES)

    @cached_property
    def num_slabs(self) -> int:
        return self.max_bytes // self.slab_bytes

    @cached_property
    def slots_per_slab(self) -> int:
        return self.slab_bytes // MIN_SLOT_BYTES

    @cached_property
    def num_slots(self) -> int:
        return self.num_slabs * self.slots_per_slab

    @cached_property
    def num_buckets(self) -> int:
        return -(-self.num_slots // BUCKET_ENTRIES)

    @cached_property
    def clock(self) -> int:
        return BLOCK

    @cached_property
    def slabs(self) -> int:
        return 2 * BLOCK

    @cached_property
    def uses(self) -> int:
        return self.slabs + _blocks(4 * self.num_slabs)

    @cached_property
    def owners(self) -> int:
        return self.uses + _blocks(8 * self.num_slots)

    @cached_property
    def buckets(self) -> int:
        return self.owners + _blocks(4 * self.num_slots)

    @cached_property
    def index_bytes(self) -> int:
        return self.buckets + self.num_buckets * BUCKET_BYTES

    def header(self) -> bytes:
        packed = _HEADER.pack(_MAGIC, VERSION, 0, self.max_bytes, self.slab_bytes)
        return packed + struct.pack("<I", zlib.crc32(packed))


def _blocks(size: int) -> int:
    return -(-size // BLOCK) * BLOCK


def prepare_folder(path: Path) -> None:
    """Create the folder, or check that an existing one is a store or empty, and private.

    Raises
    ------
    OSError
        If the folder cannot be created or read.
    PermissionError
        If other users can read or write the folder: K and V tell what the prompts say.
    ValueError
        If the folder has files that are not of a store.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    path.mkdir(mode=0o700, exist_ok=True)
    status = path.stat()
    if not stat.S_ISDIR(status.st_mode):
        raise NotADirectoryError(
            errno.ENOTDIR, "the path of a DiskStore is not a folder", str(path)
        )
    if status.st_uid != os.getuid() or status.st_mode & 0o077:
        raise PermissionError(
            errno.EPERM,
            "the folder of a DiskStore must belong to this user and have mode 0700: pages of K and "
            f"V tell what prompts say; this one has mode {stat.S_IMODE(status.st_mode):04o}",
            str(path),
        )
    strangers = sorted({entry.name for entry in path.iterdir()} - _NAMES)
    if strangers:
        raise ValueError(
            f"{path} is not the folder of a DiskStore: it has {strangers[0]!r}; choose an empty one"
        )


def open_index(path: Path, layout: Layout) -> int:
    """Open the index file, created if there is none; the caller has the lock of the folder.

    Raises
    ------
    OSError
        If the file cannot be read, or the disk has no room for it.
    ValueError
        If the file is damaged, of another version, or made for another `max_bytes`.
    """
    index = path / "index.bin"
    if not index.exists():
        _create(path, layout)
    descriptor = os.open(index, os.O_RDWR | os.O_CLOEXEC)
    try:
        _check(index, descriptor, layout)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def _create(path: Path, layout: Layout) -> None:
    # What a data file without an index has is lost; its slots would match no entry anyway.
    new = path / "index.new"
    descriptor = os.open(new, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
    try:
        allocate(descriptor, 0, layout.index_bytes, new)
        os.pwrite(descriptor, layout.header(), 0)
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
    os.rename(new, path / "index.bin")  # complete, or not there


def _check(index: Path, descriptor: int, layout: Layout) -> None:
    found = os.pread(descriptor, _HEADER.size + 4, 0)
    hint = f"remove the folder {index.parent} to start an empty store"
    if len(found) < _HEADER.size + 4 or found[:8] != _MAGIC:
        raise ValueError(f"{index} is not the index of a DiskStore; {hint}")
    _, version, _, max_bytes, _ = _HEADER.unpack(found[: _HEADER.size])
    if zlib.crc32(found[: _HEADER.size]) != int.from_bytes(found[_HEADER.size :], "little"):
        raise ValueError(f"the header of {index} is damaged; {hint}")
    if version != VERSION:
        raise ValueError(f"{index} has version {version}, this needs version {VERSION}; {hint}")
    if max_bytes != layout.max_bytes:
        raise ValueError(
            f"the store in {index.parent} was made with max_bytes={max_bytes}, got "
            f"{layout.max_bytes}; use that number, or {hint}"
        )
    if os.fstat(descriptor).st_size < layout.index_bytes:
        raise ValueError(f"{index} is cut off; {hint}")


def allocate(descriptor: int, offset: int, size: int, path: Path) -> None:
    """Reserve bytes of a file, with the path in the error if the disk has no room.

    Where the file system reserves nothing, as NFS before 4.2, the file only becomes longer: that
    the disk is full shows when values are written. The C library would write a byte to each block
    instead, which a file that bypasses the page cache refuses.
    """
    try:
        os.posix_fallocate(descriptor, offset, size)
    except OSError as error:
        if error.errno in (errno.EINVAL, errno.EOPNOTSUPP, errno.ENOSYS):
            if os.fstat(descriptor).st_size < offset + size:
                os.ftruncate(descriptor, offset + size)
            return
        raise OSError(
            error.errno, f"no room for {size} bytes: {error.strerror}", str(path)
        ) from None


def open_data(path: Path) -> int:
    """Open the data file, created if there is none, without the page cache where that works."""
    flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC
    data = path / "data.bin"
    try:
        return os.open(data, flags | getattr(os, "O_DIRECT", 0), 0o600)
    except OSError as error:
        if error.errno != errno.EINVAL:  # a file system without O_DIRECT
            raise
    return os.open(data, flags, 0o600)
