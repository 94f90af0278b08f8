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
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import NamedTuple

import numpy as np
import tvm_ffi

from .._functions import global_function
from .memory import view

BLOCK = 4096
_FOOTER = struct.Struct("<8s32sQq")  # magic, key, size, checksum
_MAGIC = b"pkvslot2"
# Adjacent slots are read or written by one call up to this size, larger values by one call each.
_RUN_BYTES = 1 << 20


def slot_bytes_of(size: int) -> int:
    """Return the bytes that a value and its footer need."""
    return -(-(size + _FOOTER.size) // BLOCK) * BLOCK


class Piece(NamedTuple):
    """A value in memory, and its slot from `offset` to `end` in the data file."""

    offset: int
    end: int
    key: bytes
    address: int
    size: int


def checksum(body: memoryview, tail: memoryview) -> int:
    """Return the checksum of a slot's value, 64 bits. It finds damage, not intent."""
    of_bytes, result = global_function("pagedkv.checksum"), 0
    for part in (body, tail):
        if len(part):
            result = of_bytes(tvm_ffi.from_dlpack(np.frombuffer(part, np.uint8)), result)
    return result


class SlotFile:
    """The data file, read and written at many offsets by a few threads.

    The threads only wait for the disk. The caller's thread computes checksums of one run of
    adjacent slots while others are in flight: several threads would fight for the interpreter.

    Parameters
    ----------
    descriptor : int
        Of the open file; `close` closes it.
    num_threads : int
    """

    def __init__(self, descriptor: int, num_threads: int) -> None:
        self._descriptor = descriptor
        self._threads = ThreadPoolExecutor(num_threads, "pagedkv-disk")
        self._buffers = [memoryview(b"")] * (num_threads + 1)  # one for each run in flight

    def read(self, pieces: Sequence[Piece]) -> list[bool]:
        """Read values to their addresses; return for each whether it is the key's whole value."""
        return self._transfer(pieces, os.preadv, _nothing, _take)

    def write(self, pieces: Sequence[Piece]) -> list[bool]:
        """Write values and footers, and wait for the disk; return for each whether it is there."""
        written = self._transfer(pieces, os.pwritev, _fill, _is_there)
        if any(written):
            os.fdatasync(self._descriptor)
        return written

    def close(self) -> None:
        self._threads.shutdown()
        os.close(self._descriptor)

    def _transfer(
        self,
        pieces: Sequence[Piece],
        call: Callable[[int, list[memoryview], int], int],
        before: Callable[[Piece, memoryview, memoryview], None],
        after: Callable[[Piece, memoryview, memoryview], bool],
    ) -> list[bool]:
        """Return for each piece whether its run got that far and what `after` says."""
        results = [False] * len(pieces)
        flights: deque[_Flight] = deque()

        def land() -> None:
            flight = flights.popleft()
            end = pieces[flight.run[0]].offset + flight.num_bytes()
            for i, (body, tail) in zip(flight.run, flight.pairs, strict=True):
                results[i] = pieces[i].end <= end and after(pieces[i], body, tail)

        try:
            for number, run in enumerate(_runs(pieces)):
                if len(flights) == len(self._buffers):
                    land()
                pairs = self._views([pieces[i] for i in run], number % len(self._buffers))
                for i, (body, tail) in zip(run, pairs, strict=True):
                    before(pieces[i], body, tail)
                memory = [part for pair in pairs for part in pair if len(part)]
                offset = pieces[run[0]].offset
                future = self._threads.submit(call, self._descriptor, memory, offset)
                flights.append(_Flight(run, pairs, future))
            while flights:
                land()
        finally:
            wait([flight.future for flight in flights])  # they use the caller's memory
        return results

    def _views(self, run: list[Piece], number: int) -> list[tuple[memoryview, memoryview]]:
        """Return views for the whole blocks and the last blocks of each slot of a run.

        O_DIRECT needs aligned memory: values at other addresses go through a buffer.
        """
        size = run[-1].end - run[0].offset
        if len(self._buffers[number]) < size:
            self._buffers[number] = memoryview(mmap.mmap(-1, max(size, _RUN_BYTES)))
        buffer = self._buffers[number]
        pairs = []
        for piece in run:
            start = piece.offset - run[0].offset
            whole = piece.size // BLOCK * BLOCK
            if piece.address % BLOCK:
                body = buffer[start : start + whole]
            else:
                body = view(piece.address, whole)
            pairs.append((body, buffer[start + whole : piece.end - run[0].offset]))
        return pairs


class _Flight(NamedTuple):
    """A run that a thread reads or writes."""

    run: list[int]
    pairs: list[tuple[memoryview, memoryview]]
    future: Future[int]

    def num_bytes(self) -> int:
        """Return how many bytes were transferred, when they are."""
        try:
            return self.future.result()
        except OSError:
            return 0


def _runs(pieces: Sequence[Piece]) -> list[list[int]]:
    """Return the indices of pieces in the order of their slots, adjacent ones together."""
    runs: list[list[int]] = []
    for i in sorted(range(len(pieces)), key=lambda i: pieces[i].offset):
        piece = pieces[i]
        if (
            runs
            and pieces[runs[-1][-1]].end == piece.offset
            and piece.end - pieces[runs[-1][0]].offset <= _RUN_BYTES
        ):
            runs[-1].append(i)
        else:
            runs.append([i])
    return runs


def _nothing(piece: Piece, body: memoryview, tail: memoryview) -> None:
    """Prepare nothing."""


def _is_there(piece: Piece, body: memoryview, tail: memoryview) -> bool:
    return True


def _fill(piece: Piece, body: memoryview, tail: memoryview) -> None:
    """Copy what is not written in place, and add the footer."""
    whole, rest = len(body), piece.size - len(body)
    if piece.address % BLOCK and whole:
        body[:] = view(piece.address, whole)
    if rest:
        tail[:rest] = view(piece.address + whole, rest)
    tail[rest:] = bytes(len(tail) - rest)
    footer = (_MAGIC, piece.key, piece.size, checksum(body, tail))
    _FOOTER.pack_into(tail, len(tail) - _FOOTER.size, *footer)


def _take(piece: Piece, body: memoryview, tail: memoryview) -> bool:
    """Return whether a slot has the whole value of the key; copy what was not read in place."""
    if not _matches(piece, body, tail):
        return False
    whole, rest = len(body), piece.size - len(body)
    if piece.address % BLOCK and whole:
        view(piece.address, whole)[:] = body
    if rest:
        view(piece.address + whole, rest)[:] = tail[:rest]
    return True


def _matches(piece: Piece, body: memoryview, tail: memoryview) -> bool:
    start = len(tail) - _FOOTER.size
    magic, key, size, expected = _FOOTER.unpack_from(tail, start)
    if (magic, key, size) != (_MAGIC, piece.key, piece.size):
        return False
    tail[start:] = bytes(_FOOTER.size)
    return checksum(body, tail) == expected
