# SPDX-License-Identifier: Apache-2.0
"""`content_digest`: whether files are likely the same, without reading them all."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping, Sequence
from pathlib import Path

_BLOCK_BYTES = 4096
_WHOLE_BYTES = 8 << 20  # files of up to this size are read as a whole
# Of larger files: blocks that are evenly spaced, and beginnings of tensors; of all files together,
# but at least `_MIN_BLOCKS` of each file.
_MAX_SPACED, _MAX_BEGINS, _MIN_BLOCKS = 256, 4096, 8


def content_digest(files: Mapping[Path, Sequence[int]]) -> str:
    """Return 16 hexadecimal digits that depend on the sizes of files and on blocks of them.

    Copies have the same digest, whatever their times are. Small files are read as a whole. Of
    larger ones the first and the last block of 4 KiB, evenly spaced ones, and the beginnings of
    tensors are read, so it is another digest where a single tensor was replaced.

    Parameters
    ----------
    files : mapping
        Files and where their tensors begin.

    Raises
    ------
    OSError
        If a file cannot be read.
    """
    digest = hashlib.sha256()
    num_spaced, num_begins = (
        max(_MIN_BLOCKS, limit // max(1, len(files))) for limit in (_MAX_SPACED, _MAX_BEGINS)
    )
    for path, begins in files.items():
        with path.open("rb", buffering=0) as file:
            size = os.fstat(file.fileno()).st_size
            digest.update(f"{size}\n".encode())
            if size <= _WHOLE_BYTES:
                digest.update(file.read())
                continue
            blocks = {0, size - _BLOCK_BYTES, *range(0, size, -(-size // num_spaced))}
            blocks |= {*_evenly(sorted(begins), num_begins)}
            for begin in sorted(blocks):
                digest.update(os.pread(file.fileno(), _BLOCK_BYTES, begin))
    return digest.hexdigest()[:16]


def _evenly(values: Sequence[int], count: int) -> Sequence[int]:
    """Return at most this many of the values, evenly spaced."""
    return values[:: max(1, -(-len(values) // count))]
