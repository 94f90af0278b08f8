# SPDX-License-Identifier: Apache-2.0
"""The pages of a batch, cut into equal splits on the device.

A KV tile is a page, or 64 positions of a larger one, of one KV head of a sequence. The KV tiles of
the batch stand in the order of sequences, heads and positions, and every block takes as many.
"""

from __future__ import annotations

from dataclasses import dataclass

from tvm.script import tirx as T

from ...spec import KernelSpec
from ..emit import I32, WARP, Variable, as_count, count_temp, index_temp
from ..warp import shuffle_xor

MAX_POSITIONS = 64  # of a KV tile


@dataclass(frozen=True)
class Pair:
    """A sequence and a KV head.

    Parameters
    ----------
    sequence, head : int32 expressions
    first_entry, num_pages : int32 expressions
        Of the sequence in the page table.
    begin, end : int64 expressions
        Its KV tiles in the batch.
    group : int
        Query heads of a KV head.
    """

    sequence: object
    head: object
    first_entry: object
    num_pages: object
    begin: object
    end: object
    group: int

    def has_row(self, row):
        """Whether it has a row of the state."""
        return row < self.group

    def output_row(self, row) -> tuple:
        """Index of a row of the state in O and its logs."""
        return self.sequence, self.head * self.group + row


class PageSchedule:
    """The splits of a batch, as a block sees them.

    Parameters
    ----------
    spec : KernelSpec
    a : the kernel's arguments `page_indptr` and `batch_size`.
    num_blocks : int32 expression
        That share the KV tiles.
    min_positions : int
        Positions of a split: so many cost no more than one.
    """

    def __init__(self, spec: KernelSpec, a, num_blocks, min_positions: int):
        self.indptr, self.batch_size = a.page_indptr, a.batch_size
        self.group = spec.group_size
        self.positions = min(spec.page_size, MAX_POSITIONS)
        self.per_page = spec.page_size // self.positions
        self.per_entry = self.per_page * spec.num_kv_heads
        self.total = count_temp(self.first_kv_tile(a.batch_size))
        size = T.truncdiv(self.total + num_blocks - 1, as_count(num_blocks))
        self.split_size = count_temp(T.max(size, T.int64(-(-min_positions // self.positions))))

    def first_kv_tile(self, sequence):
        """The number of KV tiles before those of a sequence."""
        return as_count(self.indptr[sequence]) * self.per_entry

    def owner(self, at, lane):
        """The sequence of a KV tile: a warp looks at 32 of them at once."""
        low, width = Variable(T.int32(0)), Variable(self.batch_size)
        with T.While(width.get() > 1):
            step = index_temp(T.truncdiv(width.get() + WARP - 1, WARP))
            probe = index_temp(low.get() + (lane + 1) * step)
            passed = Variable(T.int32(0))
            with T.If(probe < low.get() + width.get()), T.Then():
                with T.If(self.first_kv_tile(probe) <= at), T.Then():
                    passed.set(T.int32(1))
            for mask in (1, 2, 4, 8, 16):
                passed.set(passed.get() + shuffle_xor(passed.get(), mask))
            skipped = index_temp(passed.get() * step)
            low.set(low.get() + skipped)
            width.set(T.min(step, width.get() - skipped))
        return low.get()

    def pair(self, sequence, at) -> Pair:
        """The pair of a KV tile of a sequence."""
        sequence = index_temp(sequence)
        first_entry = index_temp(self.indptr[sequence])
        num_pages = index_temp(self.indptr[sequence + 1] - first_entry)
        num_kv_tiles = index_temp(num_pages * self.per_page)
        first = count_temp(self.first_kv_tile(sequence))
        # KV tiles of one sequence fit into 32 bits, since its K and V fit into memory.
        head = index_temp(T.truncdiv(T.cast(at - first, I32), num_kv_tiles))
        begin = count_temp(first + as_count(head) * num_kv_tiles)
        end = count_temp(begin + num_kv_tiles)
        return Pair(sequence, head, first_entry, num_pages, begin, end, self.group)
