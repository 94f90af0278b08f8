# SPDX-License-Identifier: Apache-2.0
"""Reads and writes at an offset that are complete or raise."""

from __future__ import annotations

import errno
import os


def read_exactly(descriptor: int, size: int, offset: int) -> bytes:
    """Return `size` bytes at an offset; raise an OSError if the file is shorter."""
    data = os.pread(descriptor, size, offset)
    if len(data) != size:
        raise OSError(errno.EIO, f"the file ends within {size} bytes at {offset}")
    return data


def write_exactly(descriptor: int, data: bytes, offset: int) -> None:
    """Write bytes at an offset; raise an OSError unless all are written."""
    if os.pwrite(descriptor, data, offset) != len(data):
        raise OSError(errno.EIO, f"cannot write {len(data)} bytes at {offset}")
