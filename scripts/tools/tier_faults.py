# SPDX-License-Identifier: Apache-2.0
"""Faults for prove_tiers.py: clocks that jump, and damage of files and of a server's values."""

from __future__ import annotations

import os
import random
import struct
import time
from pathlib import Path

BLOCK = 4096
_CLOCK_OFFSET = BLOCK  # of index.bin: the count of batches by which uses are compared
_YEAR = 365 * 86400.0


class Clock:
    """The clocks of a process: the wall clock jumps in both directions, the other one forth."""

    def __init__(self) -> None:
        self.real = time.monotonic
        self._real_time = time.time
        self._offset = self._time_offset = 0.0

    def monotonic(self) -> float:
        return self.real() + self._offset

    def time(self) -> float:
        return self._real_time() + self._time_offset

    def jump(self, draw: random.Random) -> None:
        """Move the clocks by up to a minute, a day or ten years, as a machine that slept does."""
        seconds = draw.choice((60.0, 86400.0, 10 * _YEAR))
        self._time_offset += draw.uniform(-1, 1) * seconds
        self._offset += draw.random() * seconds


class Damage:
    """Damage of a store's folder, and of the values of a Valkey server.

    Parameters
    ----------
    draw : random.Random
    folder : Path
    valkey : str, optional
        URL of the server.
    prefix : str
        What its keys begin with.
    """

    def __init__(self, draw: random.Random, folder: Path, valkey: str | None, prefix: str) -> None:
        self._draw, self._folder, self._prefix = draw, folder, prefix
        self._server = None
        self._old_index: bytes | None = None
        kinds = [
            self.flip_bits, self.truncate, self.remove, self.zero_blocks, self.swap_blocks,
            self.restore_index, self.set_store_clock,
        ]  # fmt: skip
        if valkey is not None:
            import redis

            self._server = redis.Redis.from_url("redis" + valkey.removeprefix("valkey"))
            kinds += [self.change_value, self.drop_connections, self.drop_values]
        self._kinds = kinds
        self.counts = {kind.__name__: 0 for kind in kinds}

    def once(self) -> None:
        """Do one kind of damage; files that are not there stay as they are."""
        kind = self._draw.choice(self._kinds)
        try:
            kind()
        except OSError:
            return
        self.counts[kind.__name__] += 1

    def _file(self, index_share: float = 0.3) -> Path:
        is_index = self._draw.random() < index_share
        return self._folder / ("index.bin" if is_index else "data.bin")

    def _blocks(self, file: int) -> int:
        """Draw the offset of a block: a beginning of a slot, where a file has data, or any."""
        count = max(os.fstat(file).st_size // BLOCK, 1)
        return self._draw.randrange(count) // self._draw.choice((1, 8)) * 8 % count * BLOCK

    def flip_bits(self) -> None:
        file = os.open(self._file(), os.O_RDWR)
        try:
            for _ in range(self._draw.choice((1, 8, 200))):
                offset = self._blocks(file) + self._draw.randrange(BLOCK)
                if byte := os.pread(file, 1, offset):
                    os.pwrite(file, bytes([byte[0] ^ 1 << self._draw.randrange(8)]), offset)
        finally:
            os.close(file)

    def truncate(self) -> None:
        path = self._file(0.1)
        os.truncate(path, self._draw.randrange(path.stat().st_size + 1))

    def remove(self) -> None:
        (self._folder / self._draw.choice(("data.bin", "index.bin", "lock"))).unlink()

    def zero_blocks(self) -> None:
        file = os.open(self._file(), os.O_RDWR)
        try:
            for _ in range(self._draw.randint(1, 20)):
                os.pwrite(file, bytes(BLOCK), self._blocks(file))
        finally:
            os.close(file)

    def swap_blocks(self) -> None:
        """Exchange parts of slots: each is whole, but in the place of another."""
        file = os.open(self._file(0.1), os.O_RDWR)
        try:
            for _ in range(20):
                one, two = self._blocks(file), self._blocks(file)
                size = self._draw.choice((BLOCK, 8 * BLOCK))
                first, second = os.pread(file, size, one), os.pread(file, size, two)
                os.pwrite(file, first, two)
                os.pwrite(file, second, one)
        finally:
            os.close(file)

    def restore_index(self) -> None:
        """Put an old index over the newer data, as after a loss of power."""
        path = self._folder / "index.bin"
        old, self._old_index = self._old_index, path.read_bytes()
        if old is not None:
            path.write_bytes(old)

    def set_store_clock(self) -> None:
        file = os.open(self._folder / "index.bin", os.O_RDWR)
        try:
            now = self._draw.choice((0, 1, 1 << 40, 2**62, 2**64 - 1))
            os.pwrite(file, struct.pack("<Q", now), _CLOCK_OFFSET)
        finally:
            os.close(file)

    def _keys(self) -> list[bytes]:
        keys = self._server.keys(self._prefix + "*")
        return self._draw.sample(sorted(keys), min(len(keys), 10))

    def change_value(self) -> None:
        for key in self._keys():
            value = bytearray(self._server.get(key) or b"")
            if value and self._draw.random() < 0.7:
                value[self._draw.randrange(len(value))] ^= 1 << self._draw.randrange(8)
            else:
                value = value[: len(value) // 2]
            self._server.set(key, bytes(value))
        keys = self._keys()
        if len(keys) > 1:
            self._server.set(keys[0], self._server.get(keys[1]) or b"")

    def drop_connections(self) -> None:
        self._server.execute_command("CLIENT", "KILL", "TYPE", "normal", "SKIPME", "yes")

    def drop_values(self) -> None:
        for key in self._keys():
            self._server.delete(key)
