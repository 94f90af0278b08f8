# SPDX-License-Identifier: Apache-2.0
"""Slots of the data file of a `DiskStore`: their layout, and batched reads and writes of them.

A slot holds one value and ends with a block that has the last bytes of the value and a footer:

    | whole blocks of the value | rest of the value, zeros, footer |
      read and written in place   through a buffer of the store

All offsets and sizes are multiples of `BLOCK`, so the file can be opened with O_DIRECT: the page
cache would cost a copy of each byte and memory that the host tier uses better. The footer names the
key and has a checksum. A slot that is torn, stale or damaged does not match it.
"""

from __future__ import annotations

import mmap
import os
import struct
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import numpy as np

from .memory import view

BLOCK = 4096
_FOOTER = struct.Struct("<8s32sQQ")  # magic, key, size, checksum
_MAGIC = b"pkvslot1"
_WORDS = BLOCK // 8
# Adjacent slots are read or written by one call up to this size, larger values by one call each.
_RUN_BYTES = 1 << 20


def slot_bytes_of(size: int) -> int:
    """Return the bytes that a value and its footer need."""
    return -(-(size + _FOOTER.size) // BLOCK) * BLOCK


class Piece(NamedTuple):
    """A value in memory and the offset of its slot in the data file."""

    offset: int
    key: bytes
    address: int
    size: int

    @property
    def end(self) -> int:
        return self.offset + slot_bytes_of(self.size)


def _odd_weights(count: int) -> np.ndarray:
    """Return fixed pseudo-random odd weights (splitmix64), the same for each NumPy version."""
    state = np.arange(1, count + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    state = (state ^ (state >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    state = (state ^ (state >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return (state ^ (state >> np.uint64(31))) | np.uint64(1)


_WEIGHTS = _odd_weights(_WORDS)


def checksum(*parts: memoryview) -> int:
    """Return a 64-bit checksum of parts whose lengths are multiples of `BLOCK`.

    A weighted sum modulo 2**64, with odd weights within a block and over blocks: a change within
    one aligned word always shows, others but for one in about 2**64. NumPy computes it at the speed
    of memory, which no checksum of the standard library does. It is no protection against intent.
    """
    sums = [np.einsum("ij,j->i", _blocks(part), _WEIGHTS) for part in parts if len(part)]
    each = np.concatenate(sums) if len(sums) > 1 else sums[0]
    total = 0
    for start in range(0, len(each), _WORDS):
        some = each[start : start + _WORDS]
        total = total * 0x9E3779B97F4A7C15 + int((some * _WEIGHTS[: len(some)]).sum())
    return total & 0xFFFFFFFFFFFFFFFF


def _blocks(part: memoryview) -> np.ndarray:
    return np.frombuffer(part, np.uint64).reshape(-1, _WORDS)


class SlotFile:
    """The data file, read and written at many offsets by a few threads.

    Parameters
    ----------
    descriptor : int
        Of the open file; `close` closes it.
    num_threads : int
    """

    def __init__(self, descriptor: int, num_threads: int) -> None:
        self._descriptor = descriptor
        self._num_threads = num_threads
        self._local = threading.local()
        self._threads = ThreadPoolExecutor(num_threads, "pagedkv-disk")

    def read(self, pieces: Sequence[Piece]) -> list[bool]:
        """Read values to their addresses; return for each whether it is the key's whole value."""
        return self._each_run(pieces, self._read_run)

    def write(self, pieces: Sequence[Piece]) -> list[bool]:
        """Write values and footers, and wait for the disk; return for each whether it is there."""
        written = self._each_run(pieces, self._write_run)
        if any(written):
            os.fdatasync(self._descriptor)
        return written

    def close(self) -> None:
        self._threads.shutdown()
        os.close(self._descriptor)

    def _each_run(
        self, pieces: Sequence[Piece], work: Callable[[list[Piece]], list[bool]]
    ) -> list[bool]:
        order = sorted(range(len(pieces)), key=lambda i: pieces[i].offset)
        runs: list[list[Piece]] = []
        for i in order:
            piece = pieces[i]
            if (
                runs
                and runs[-1][-1].end == piece.offset
                and piece.end - runs[-1][0].offset <= _RUN_BYTES
            ):
                runs[-1].append(piece)
            else:
                runs.append([piece])
        # A few tasks: starting one takes longer than reading 64 KiB.
        share = -(-len(runs) // (2 * self._num_threads)) or 1
        tasks = [runs[start : start + share] for start in range(0, len(runs), share)]

        def do(task: list[list[Piece]]) -> list[bool]:
            return [ok for run in task for ok in work(run)]

        done = [ok for results in self._threads.map(do, tasks) for ok in results]
        results = [False] * len(pieces)
        for i, ok in zip(order, done, strict=True):
            results[i] = ok
        return results

    def _write_run(self, run: list[Piece]) -> list[bool]:
        buffers: list[memoryview] = []
        for piece, (body, tail) in zip(run, self._buffers(run), strict=True):
            whole = len(body)
            if piece.address % BLOCK and whole:
                body[:] = view(piece.address, whole)
            rest = piece.size - whole
            tail[rest:] = bytes(len(tail) - rest)
            if rest:
                tail[:rest] = view(piece.address + whole, rest)
            footer = (_MAGIC, piece.key, piece.size, checksum(body, tail))
            _FOOTER.pack_into(tail, len(tail) - _FOOTER.size, *footer)
            buffers += [body, tail] if whole else [tail]
        try:
            count = os.pwritev(self._descriptor, buffers, run[0].offset)
        except OSError:
            return [False] * len(run)
        return [piece.end - run[0].offset <= count for piece in run]

    def _read_run(self, run: list[Piece]) -> list[bool]:
        pairs = self._buffers(run)
        try:
            buffers = [buffer for pair in pairs for buffer in pair if len(buffer)]
            count = os.preadv(self._descriptor, buffers, run[0].offset)
        except OSError:
            return [False] * len(run)
        results = []
        for piece, (body, tail) in zip(run, pairs, strict=True):
            is_whole = piece.end - run[0].offset <= count and _matches(piece, body, tail)
            if is_whole:
                whole = len(body)
                if piece.address % BLOCK and whole:
                    view(piece.address, whole)[:] = body
                if piece.size > whole:
                    view(piece.address + whole, piece.size - whole)[:] = tail[: piece.size - whole]
            results.append(is_whole)
        return results

    def _buffers(self, run: list[Piece]) -> list[tuple[memoryview, memoryview]]:
        """Return views for the whole blocks and the last block of each slot of a run.

        O_DIRECT needs aligned memory: values at other addresses go through a buffer of the thread.
        """
        buffer = self._buffer(run[-1].end - run[0].offset)
        pairs, at = [], 0
        for piece in run:
            whole, end = piece.size // BLOCK * BLOCK, at + piece.end - piece.offset
            if piece.address % BLOCK:
                body = buffer[at : at + whole]
            else:
                body = view(piece.address, whole)
            pairs.append((body, buffer[at + whole : end]))
            at = end
        return pairs

    def _buffer(self, size: int) -> memoryview:
        if getattr(self._local, "size", 0) < size:
            self._local.size = max(size, _RUN_BYTES)
            self._local.buffer = memoryview(mmap.mmap(-1, self._local.size))
        return self._local.buffer


def _matches(piece: Piece, body: memoryview, tail: memoryview) -> bool:
    start = len(tail) - _FOOTER.size
    magic, key, size, expected = _FOOTER.unpack_from(tail, start)
    if (magic, key, size) != (_MAGIC, piece.key, piece.size):
        return False
    tail[start:] = bytes(_FOOTER.size)
    return checksum(body, tail) == expected
