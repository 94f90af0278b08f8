# SPDX-License-Identifier: Apache-2.0
"""The index of a `DiskStore`: which key is in which slot, and which slots to use next.

Several processes share the index file. Those that change keys or slots hold the file lock; lookups
do not, so what they find is a hint that the footer of the slot must confirm. Each change is a write
to one place, in an order that is safe to stop at any point:

1. `reserve` removes the entries of the least recently used slots and marks the slots as used now.
2. The caller writes the slots, without the lock.
3. `publish` adds entries for the slots that were written.

A process that is killed in between leaves slots without entries. They are reused when they are the
least recently used ones, so nothing has to be recovered.
"""

from __future__ import annotations

import struct
import zlib
from collections import deque
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from .disk_layout import BUCKET_BYTES, BUCKET_ENTRIES, ENTRY_BYTES, MIN_SLOT_BYTES, Layout
from .memory import KEY_BYTES
from .positioned import read_exactly, write_exactly

_ENTRY = struct.Struct("<32sQQ")  # key, size, slot
_SIZE_AND_SLOT = struct.Struct("<QQ")
_USE = struct.Struct("<Q")
_OWNER = struct.Struct("<I")
_MAX_CLOCK = 2**62  # a clock beyond it is damage


class Found(NamedTuple):
    slot: int
    size: int
    offset: int


class Reserved(NamedTuple):
    slot: int
    offset: int
    use: int


class DiskIndex:
    """The index file.

    Parameters
    ----------
    descriptor : int
        Of the open file; the caller closes it.
    layout : Layout
    grow : callable
        ``grow(offset, size)`` reserves bytes of the data file; an OSError says that the disk is
        full.
    """

    def __init__(self, descriptor: int, layout: Layout, grow: Callable[[int, int], None]) -> None:
        self._descriptor = descriptor
        self._layout = layout
        self._grow = grow
        # By slot size: slots to use next, with the use that each had when they were chosen.
        self._victims: dict[int, deque[tuple[int, int]]] = {}

    # Lookups, without the lock.

    def find(self, keys: Sequence[bytes]) -> list[Found | None]:
        """Return for each key where its value should be."""
        slabs = self._slabs()
        return [self._found(_entry_of(key, self._read_buckets(key)), slabs) for key in keys]

    def touch(self, slots: Sequence[int]) -> None:
        """Mark slots as used now."""
        if slots:
            now = self._tick()
            for slot in slots:
                self._set_use(slot, now)

    # Changes; the caller has the lock.

    def reserve(self, sizes: Sequence[int]) -> list[Reserved | None]:
        """Take slots of the given sizes in bytes; None where there is no room."""
        now = self._tick()
        slabs = self._slabs()
        wanted = [max(size, MIN_SLOT_BYTES) for size in sizes]
        reserved: list[Reserved | None] = []
        for i, slot_bytes in enumerate(wanted):
            slot = None
            if slot_bytes <= self._layout.slab_bytes:
                slot = self._take(slot_bytes, slabs, now, wanted[i:].count(slot_bytes))
            if slot is None:
                reserved.append(None)
                continue
            self._disown(slot)
            self._set_use(slot, now)
            reserved.append(Reserved(slot, self._offset(slot, slabs), now))
        return reserved

    def publish(self, values: Sequence[tuple[bytes, int, Reserved]]) -> list[bool]:
        """Add entries of slots that were written; False where another process has taken the slot.

        Parameters
        ----------
        values : sequence of (key, size, reserved)
        """
        slabs = self._slabs()
        return [self._publish(*value, slabs) for value in values]

    def _publish(self, key: bytes, size: int, reserved: Reserved, slabs: np.ndarray) -> bool:
        if self._use(reserved.slot) != reserved.use:
            return False
        buckets = self._read_buckets(key)
        found = self._found(_entry_of(key, buckets), slabs)
        if found is not None and found.size == size:  # another process was faster
            self._set_use(reserved.slot, 0)
            return True
        if _entry_of(key, buckets) is not None:  # a value of another size
            self.remove(key)
            buckets = self._read_buckets(key)
        number = self._place(buckets)
        self._put_owner(reserved.slot, number + 1)
        self._write_entry(number, _ENTRY.pack(key, size, reserved.slot))
        return True

    def release(self, reserved: Reserved) -> None:
        """Give back a slot that was not written."""
        if self._use(reserved.slot) == reserved.use:
            self._set_use(reserved.slot, 0)

    def remove(self, key: bytes) -> None:
        """Remove the entry of a key, if it has one, and free its slot."""
        entry = _entry_of(key, self._read_buckets(key))
        if entry is not None:
            number, _, slot = entry
            self._write_entry(number, bytes(_ENTRY.size))
            if slot < self._layout.num_slots:
                self._set_use(slot, 0)

    # Which slots come next.

    def _take(self, slot_bytes: int, slabs: np.ndarray, now: int, count: int) -> int | None:
        """Return a slot of a size that is free or least recently used, or None."""
        victims = self._victims.setdefault(slot_bytes, deque())
        for _ in range(2):
            while victims:
                slot, use = victims.popleft()
                # Others may have used it, or its slab, since it was chosen.
                if slabs[slot // self._layout.slots_per_slab] == slot_bytes:
                    if self._use(slot) == use:
                        return slot
            victims.extend(self._choose(slot_bytes, slabs, now, count))
        return None

    def _choose(
        self, slot_bytes: int, slabs: np.ndarray, now: int, count: int
    ) -> list[tuple[int, int]]:
        """Return slots to use next: those of an unused slab, free ones, or the oldest."""
        per_slab = self._layout.slots_per_slab
        num_slots = self._layout.slab_bytes // slot_bytes
        slab = self._add_slab(slot_bytes, slabs)  # first, for uses are a long list to read
        if slab is not None:
            return [(slab * per_slab + i, 0) for i in range(num_slots)]
        uses = self._uses().reshape(-1, per_slab)
        uses[uses > now] = 1  # damaged: not from the future
        own = np.flatnonzero(slabs == slot_bytes)
        slots = own[:, None] * per_slab + np.arange(num_slots)
        own_uses = uses[own, :num_slots].ravel()
        slots = slots.ravel()
        free = np.flatnonzero(own_uses == 0)
        if len(free):
            return [(int(slots[i]), 0) for i in free]
        slab = self._take_slab(slot_bytes, slabs, uses, own_uses, now)
        if slab is not None:
            return [(slab * per_slab + i, 0) for i in range(num_slots)]
        # A batch must not evict what it has stored itself.
        old = np.flatnonzero(own_uses < now)
        if not len(old):
            return []
        # Some at a time: choosing costs a look at all uses. Ascending slots are read and written
        # faster than the exact order of their use.
        count = min(len(old), max(count, len(own_uses) // 32))
        oldest = old[np.argpartition(own_uses[old], count - 1)[:count]]
        actual = self._uses()
        return [(int(slot), int(actual[slot])) for slot in np.sort(slots[oldest])]

    def _add_slab(self, slot_bytes: int, slabs: np.ndarray) -> int | None:
        """Give an unused slab to a size, if there is one and the disk has room."""
        unused = np.flatnonzero(slabs == 0)
        if not len(unused):
            return None
        slab, size = int(unused[0]), self._layout.slab_bytes
        try:
            self._grow(slab * size, size)
        except OSError:
            return None  # the disk is full: live with what the store has
        self._give(slab, slot_bytes, slabs)
        return slab

    def _take_slab(
        self, slot_bytes: int, slabs: np.ndarray, uses: np.ndarray, own_uses: np.ndarray, now: int
    ) -> int | None:
        """Give a slab of another size to a size, if all its values are older than the own ones."""
        newest = uses.max(axis=1)
        newest[(slabs == slot_bytes) | (slabs == 0)] = now
        slab = int(newest.argmin())
        if newest[slab] >= (int(own_uses.min()) if len(own_uses) else now):
            return None
        first = slab * self._layout.slots_per_slab
        for slot in range(first, first + self._layout.slots_per_slab):
            self._disown(slot)
        self._give(slab, slot_bytes, slabs)
        return slab

    def _give(self, slab: int, slot_bytes: int, slabs: np.ndarray) -> None:
        per_slab = self._layout.slots_per_slab
        write_exactly(
            self._descriptor, bytes(8 * per_slab), self._layout.uses + 8 * slab * per_slab
        )
        slabs[slab] = slot_bytes
        write_exactly(self._descriptor, _OWNER.pack(slot_bytes), self._layout.slabs + 4 * slab)

    # Entries.

    def _found(self, entry: tuple[int, int, int] | None, slabs: np.ndarray) -> Found | None:
        if entry is None or entry[2] >= self._layout.num_slots:  # the latter is damage
            return None
        _, size, slot = entry
        offset = self._offset(slot, slabs)
        return None if offset < 0 else Found(slot, size, offset)

    def _place(self, buckets: list[tuple[int, bytes]]) -> int:
        """Return the number of an entry of two buckets: a free one, or that of the oldest value.

        Of the emptier bucket, which keeps nearly all of them from being full.
        """
        free: list[list[int]] = []
        used: list[tuple[int, int]] = []
        for first, entries in buckets:
            free.append([])
            for i in range(BUCKET_ENTRIES):
                size, slot = _SIZE_AND_SLOT.unpack_from(entries, i * ENTRY_BYTES + KEY_BYTES)
                if size and slot < self._layout.num_slots:
                    used.append((first + i, slot))
                else:
                    free[-1].append(first + i)
        emptier = max(free, key=len)
        if emptier:
            return emptier[0]
        number, slot = min(used, key=lambda entry: self._use(entry[1]))
        self._write_entry(number, bytes(_ENTRY.size))
        self._set_use(slot, 0)
        return number

    def _disown(self, slot: int) -> None:
        """Remove the entry of a slot, if it still has one."""
        data = read_exactly(self._descriptor, _OWNER.size, self._layout.owners + 4 * slot)
        number = _OWNER.unpack(data)[0] - 1
        if not 0 <= number < self._layout.num_buckets * BUCKET_ENTRIES:
            return
        offset = self._layout.buckets + number * ENTRY_BYTES
        _, size, owned = _ENTRY.unpack(read_exactly(self._descriptor, _ENTRY.size, offset))
        if size and owned == slot:
            self._write_entry(number, bytes(_ENTRY.size))

    def _read_buckets(self, key: bytes) -> list[tuple[int, bytes]]:
        """Return the two buckets that may have a key: the number of the first entry, the bytes."""
        buckets = []
        for checksum in (zlib.crc32(key), zlib.crc32(key[::-1])):
            bucket = checksum % self._layout.num_buckets
            offset = self._layout.buckets + bucket * BUCKET_BYTES
            data = read_exactly(self._descriptor, BUCKET_BYTES, offset)
            buckets.append((bucket * BUCKET_ENTRIES, data))
        return buckets

    def _write_entry(self, number: int, data: bytes) -> None:
        write_exactly(self._descriptor, data, self._layout.buckets + number * ENTRY_BYTES)

    # Numbers of slots and slabs.

    def _offset(self, slot: int, slabs: np.ndarray) -> int:
        slab, i = divmod(slot, self._layout.slots_per_slab)
        slot_bytes = int(slabs[slab])
        if not slot_bytes or (i + 1) * slot_bytes > self._layout.slab_bytes:
            return -1
        return slab * self._layout.slab_bytes + i * slot_bytes

    def _slabs(self) -> np.ndarray:
        data = read_exactly(self._descriptor, 4 * self._layout.num_slabs, self._layout.slabs)
        slabs = np.frombuffer(data, np.uint32).copy()
        slabs[(slabs > self._layout.slab_bytes) | (slabs % 4096 != 0)] = 0  # damaged
        return slabs

    def _uses(self) -> np.ndarray:
        data = read_exactly(self._descriptor, 8 * self._layout.num_slots, self._layout.uses)
        return np.frombuffer(data, np.uint64).copy()

    def _use(self, slot: int) -> int:
        data = read_exactly(self._descriptor, _USE.size, self._layout.uses + 8 * slot)
        return int(_USE.unpack(data)[0])

    def _set_use(self, slot: int, use: int) -> None:
        write_exactly(self._descriptor, _USE.pack(use), self._layout.uses + 8 * slot)

    def _put_owner(self, slot: int, number: int) -> None:
        write_exactly(self._descriptor, _OWNER.pack(number), self._layout.owners + 4 * slot)

    def _tick(self) -> int:
        """Advance the clock. Lookups do it without the lock: two of them may get the same time."""
        now = _USE.unpack(read_exactly(self._descriptor, _USE.size, self._layout.clock))[0] + 1
        if now > _MAX_CLOCK:
            now = 2  # damaged: all uses are from the future then, and count as old
        write_exactly(self._descriptor, _USE.pack(now), self._layout.clock)
        return int(now)


def _entry_of(key: bytes, buckets: list[tuple[int, bytes]]) -> tuple[int, int, int] | None:
    """Return the number of a key's entry, the size of its value, and its slot."""
    for first, entries in buckets:
        at = entries.find(key)
        while at >= 0 and at % ENTRY_BYTES:
            at = entries.find(key, at + 1)
        if at >= 0:
            size, slot = _SIZE_AND_SLOT.unpack_from(entries, at + KEY_BYTES)
            if size:
                return first + at // ENTRY_BYTES, size, slot
    return None
