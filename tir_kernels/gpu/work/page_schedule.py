# SPDX-License-Identifier: Apache-2.0
"""The pages of a batch, cut into equal splits on the device.

A KV tile is a page, or 64 positions of a larger one, of one KV head of a sequence. The KV tiles of
the batch stand in the order of sequences, heads and positions, and every block takes as many.
A KV head is always that of a sequence.
"""

from __future__ import annotations

import operator

from tvm.script import tirx as T

from ...script import inline
from ...spec import KernelSpec
from ..isa import isa_of
from ..registers import I32, WARP

MAX_POSITIONS = 64  # of a KV tile


@T.meta_class
class PageSchedule:
    """The splits of a batch, as a block sees them: its work, one KV head after the other.

    Parameters
    ----------
    spec : KernelSpec
    page_indptr, batch_size : the kernel's arguments
    num_blocks : int32 expression
        That share the KV tiles.
    min_positions : int
        Positions of a split: so many cost no more than one.

    Attributes
    ----------
    total, split_size : wide integers
        KV tiles of the batch, and of a split.
    sequence, head : int32
        The KV head.
    first_entry, num_pages : int32
        Of the sequence in the page table.
    num_kv_tiles, first, end : int32
        KV tiles of the KV head; the block takes ``first .. end - 1`` of them.
    left : int32
        KV tiles of the split after them.
    index : wide integer
        The first of those, of the batch.
    """

    def __init__(self, spec: KernelSpec, page_indptr, batch_size, num_blocks, min_positions: int):
        self.isa = isa_of(spec.target)
        self.indptr, self.batch_size, self.num_blocks = page_indptr, batch_size, num_blocks
        self.group_size, self.positions = spec.group_size, min(spec.page_size, MAX_POSITIONS)
        self.per_page = spec.page_size // self.positions
        self.per_entry = self.per_page * spec.num_kv_heads
        self.min_size = -(-min_positions // self.positions)
        self.total, self.split_size = (self.isa.wide_variable() for _ in range(2))
        self.sequence, self.head = T.local_scalar(I32), T.local_scalar(I32)
        self.first_entry, self.num_pages = T.local_scalar(I32), T.local_scalar(I32)
        self.num_kv_tiles, self.left = T.local_scalar(I32), T.local_scalar(I32)
        self.first, self.end = T.local_scalar(I32), T.local_scalar(I32)
        self.index = self.isa.wide_variable()

    def first_kv_tile(self, sequence):
        """Return the number of KV tiles before those of a sequence."""
        return self.isa.wide(self.indptr[sequence]) * self.per_entry

    @inline
    def measure(self):
        """Find how many KV tiles there are, and how many a block takes."""
        self.total = self.first_kv_tile(self.batch_size)
        size = T.meta_var(
            T.truncdiv(self.total + self.num_blocks - 1, self.isa.wide(self.num_blocks))
        )
        self.split_size = T.max(size, self.isa.wide(self.min_size))

    @inline
    def take_split(self, block, lane):
        """Take the split of a block: the end of one KV head, whole ones, and one begun."""
        self.measure()
        self.index = self.isa.wide(block) * self.split_size
        # The share of a block fits into 32 bits, and registers are scarce.
        left = T.meta_var(T.max(T.min(self.split_size, self.total - self.index), self.isa.wide(0)))
        self.left = T.cast(left, I32)
        if self.left > 0:
            self.find_sequence(self.index, lane)

    def has_next(self):
        """Whether KV tiles of the split are left."""
        return self.left > 0

    @inline
    def advance(self):
        """Advance to the next KV head."""
        while self.first_kv_tile(self.sequence + 1) <= self.index:
            self.sequence += 1
        self.find_head(self.index)
        count = T.min(self.num_kv_tiles - self.first, self.left)
        self.end = self.first + count
        self.left -= count
        self.index += self.isa.wide(count)

    @inline
    def find_sequence(self, kv_tile, lane):
        """Find the sequence of a KV tile: a warp looks at 32 of them at once."""
        self.sequence = 0
        width: T.int32 = self.batch_size
        while width > 1:
            step = T.truncdiv(width + WARP - 1, WARP)
            probe = self.sequence + (lane + 1) * step
            passed = T.int32(0)
            if probe < self.sequence + width:
                if self.first_kv_tile(probe) <= kv_tile:
                    passed = 1
            skipped = self.isa.over_lanes(passed, operator.add) * step
            self.sequence += skipped
            width = T.min(step, width - skipped)

    @inline
    def find_head(self, kv_tile):
        """Find the KV head of a KV tile of the sequence, and which of its tiles it is: `first`."""
        self.first_entry = self.indptr[self.sequence]
        self.num_pages = self.indptr[self.sequence + 1] - self.first_entry
        self.num_kv_tiles = self.num_pages * self.per_page
        # KV tiles of one sequence fit into 32 bits, since its K and V fit into memory.
        number = T.cast(kv_tile - self.first_kv_tile(self.sequence), I32)
        self.head = T.truncdiv(number, self.num_kv_tiles)
        self.first = number - self.head * self.num_kv_tiles

    def is_whole(self):
        """Whether the block has the whole KV head."""
        return T.And(self.first == 0, self.end == self.num_kv_tiles)

    def position(self, kv_tile):
        """Return the position of the sequence at which a KV tile begins."""
        return kv_tile * self.positions

    @inline
    def find_cut(self, block, lane):
        """Find the KV head that the end of a block's split cuts; if none, `first` is 0."""
        self.measure()
        self.index = self.isa.wide(block + 1) * self.split_size
        self.first = 0
        if self.index < self.total:
            self.find_sequence(self.index, lane)
            self.find_head(self.index)

    def begins_in_split(self):
        """Whether the KV head that is cut begins in the split: its block merges it."""
        return T.And(self.first > 0, self.isa.wide(self.first) <= self.split_size)

    def num_splits(self, block):
        """Return the number of splits that have some of the KV head, from a block's on."""
        last = self.index - self.isa.wide(self.first) + self.isa.wide(self.num_kv_tiles) - 1
        return T.cast(T.truncdiv(last, self.split_size), I32) - block + 1
