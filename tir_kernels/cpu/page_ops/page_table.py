# SPDX-License-Identifier: Apache-2.0
"""Arithmetic on page tables: slots of rows, lengths, positions, vector-sparse offsets.

A page table of B sequences is three int32 arrays: ``indices [N]`` (pages, in order of position),
``indptr [B + 1]`` (sequence b has ``indices[indptr[b] : indptr[b + 1]]``) and ``last_page_len [B]``
(slots in use in the last of them; of no meaning where there is none).

Every kernel checks what it is given and takes an int64 ``[3]`` of zeros last: a `Finding`, the
index at which it was made, and the offending number. A kernel that makes one writes nothing else
that matters, and reads nothing out of bounds.
"""

import enum
from collections.abc import Callable

from tvm.script import tirx as T

from ...define import target_attributes
from ...script import inline, prim_func
from ..isa.simd import index_temp
from ..tasks import TASKS, cut
from ..worker import SERIAL_BELOW_BYTES
from .arrays import match

_NUM_TASKS = 32  # of each sequence, where there is enough for several threads
_CPU = target_attributes(on_cpu=True)


class Finding(enum.IntEnum):
    """A fault of a page table, or of rows that refer to it."""

    NONE = 0
    INDPTR_ORDER = 1  # indptr[i] is negative or below the one before it
    INDPTR_END = 2  # indptr[i] exceeds what it points into
    LAST_PAGE_LEN = 3  # last_page_len[b] is not in [0, page_size], or not positive where it must be
    BATCH_INDEX = 4  # batch_indices[n] is not in [-1, B)
    POSITION = 5  # positions[n] is not in the pages of its sequence
    PAGE = 6  # indices[i] is not in [0, P)
    NO_PAGE = 7  # sequence b has no page
    SEQ_LEN = 8  # seq_lens[b] is less than the number of rows appended to it
    KV_LEN = 9  # kv_lens[b] is not in [0, slots of the pages of its sequence]
    OUTPUT_ORDER = 10  # the output's indptr[i] is negative or below the one before it
    OUTPUT_END = 11  # the output's indptr[i] exceeds what it points into
    OUTPUT_ROOM = 12  # the output range of sequence b is shorter than the sequence
    OVERFLOW = 13  # a result for sequence b exceeds int32


_INDPTR = (Finding.INDPTR_ORDER, Finding.INDPTR_END)
_OUTPUT_INDPTR = (Finding.OUTPUT_ORDER, Finding.OUTPUT_END)


@T.meta_class
class Check:
    """Records the first finding; `passed` is whether there is none so far."""

    def __init__(self, found):
        self.found = found

    @property
    def passed(self):
        """Whether nothing was found."""
        return self.found[0] == T.int64(0)

    @inline
    def require(self, condition, finding, index, value):
        """Record a finding unless a condition holds."""
        if self.passed and not condition:
            self.found[0] = T.int64(int(finding))
            self.found[1] = T.cast(index, "int64")
            self.found[2] = T.cast(value, "int64")

    @inline
    def ascends(self, indptr, count, limit, findings):
        """Require ``0 <= indptr[0] <= ... <= indptr[count] <= limit``."""
        order, end = T.meta_var(findings)
        before: T.int64 = T.int64(0)
        for i in range(count + 1):
            here = T.cast(indptr[i], "int64")
            self.require(here >= before, order, i, here)
            self.require(here <= limit, end, i, here)
            before = here


@T.meta_class
class PageTable:
    """The page table of a batch."""

    def __init__(self, indices, indptr, last_page_len):
        self.indices, self.indptr, self.last_page_len = indices, indptr, last_page_len
        self.num_sequences = last_page_len.shape[0]

    @inline
    def check(self, check, page_size, min_last_page_len):
        """Require that it is well formed."""
        check.ascends(self.indptr, self.num_sequences, self.indices.shape[0], _INDPTR)
        if check.passed:
            for b in range(self.num_sequences):
                last = T.cast(self.last_page_len[b], "int64")
                fits = last >= min_last_page_len and last <= page_size
                is_empty = self.indptr[b] == self.indptr[b + 1]
                check.require(is_empty or fits, Finding.LAST_PAGE_LEN, b, last)

    @inline
    def put_slot(self, check, slots, n, entry, offset, num_pages):
        """Store slot `offset` of the page of table entry `entry`, which is valid, as slot `n`."""
        page = T.cast(self.indices[entry], "int64")
        check.require(page >= 0 and page < num_pages, Finding.PAGE, entry, page)
        slots[n, 0] = T.cast(page, "int32")
        slots[n, 1] = T.cast(offset, "int32")


def row_slots():
    """Build the kernel that finds the slots of rows given by sequence and position.

    Arguments: batch_indices int32 ``[T]`` (-1: no slot), positions int32 ``[T]``, the page table
    (indices, indptr, last_page_len), num_pages and page_size: int64, slots int32 ``[T, 2]``
    (page or -1, offset in it), finding.
    """

    @prim_func
    def row_slots(
        var_batch_indices: T.handle,
        var_positions: T.handle,
        var_indices: T.handle,
        var_indptr: T.handle,
        var_last_page_len: T.handle,
        num_pages: T.int64,
        page_size: T.int64,
        var_slots: T.handle,
        var_finding: T.handle,
    ):
        T.func_attr(_CPU)
        num_rows, num_sequences, num_entries = T.int64(), T.int64(), T.int64()
        batch_indices = match(var_batch_indices, (num_rows,), "int32")
        positions = match(var_positions, (num_rows,), "int32")
        indices = match(var_indices, (num_entries,), "int32")
        indptr = match(var_indptr, (num_sequences + 1,), "int32")
        last_page_len = match(var_last_page_len, (num_sequences,), "int32")
        slots = match(var_slots, (num_rows, 2), "int32")
        check = Check(match(var_finding, (3,), "int64"))
        table = PageTable(indices, indptr, last_page_len)
        table.check(check, page_size, 0)
        if check.passed:
            for n in range(num_rows):
                b = T.cast(batch_indices[n], "int64")
                check.require(b >= -1 and b < num_sequences, Finding.BATCH_INDEX, n, b)
                slots[n, 0] = -1
                slots[n, 1] = 0
                if check.passed and b >= 0:
                    begin, end = T.cast(indptr[b], "int64"), T.cast(indptr[b + 1], "int64")
                    position = T.cast(positions[n], "int64")
                    is_inside = position >= 0 and position < (end - begin) * page_size
                    check.require(is_inside, Finding.POSITION, n, position)
                    if check.passed:
                        entry = begin + T.truncdiv(position, page_size)
                        offset = T.meta_var(T.truncmod(position, page_size))
                        table.put_slot(check, slots, n, entry, offset, num_pages)

    return row_slots


def last_slots():
    """Build the kernel that finds the slot of each sequence's last position.

    Arguments: the page table (indices, indptr, last_page_len; no sequence is empty), num_pages and
    page_size: int64, slots int32 ``[B, 2]`` (page, offset in it), finding.
    """

    @prim_func
    def last_slots(
        var_indices: T.handle,
        var_indptr: T.handle,
        var_last_page_len: T.handle,
        num_pages: T.int64,
        page_size: T.int64,
        var_slots: T.handle,
        var_finding: T.handle,
    ):
        T.func_attr(_CPU)
        num_sequences, num_entries = T.int64(), T.int64()
        indices = match(var_indices, (num_entries,), "int32")
        indptr = match(var_indptr, (num_sequences + 1,), "int32")
        last_page_len = match(var_last_page_len, (num_sequences,), "int32")
        slots = match(var_slots, (num_sequences, 2), "int32")
        check = Check(match(var_finding, (3,), "int64"))
        table = PageTable(indices, indptr, last_page_len)
        table.check(check, page_size, 1)
        if check.passed:
            for b in range(num_sequences):
                begin, end = T.cast(indptr[b], "int64"), T.cast(indptr[b + 1], "int64")
                check.require(end > begin, Finding.NO_PAGE, b, end - begin)
                if check.passed:
                    table.put_slot(check, slots, b, end - 1, last_page_len[b] - 1, num_pages)

    return last_slots


def sequence_lengths():
    """Build the kernel that computes lengths; 0 for a sequence without a page.

    Arguments: indptr, last_page_len, page_size: int64, lengths int32 ``[B]``, finding.
    """

    @prim_func
    def sequence_lengths(
        var_indptr: T.handle,
        var_last_page_len: T.handle,
        page_size: T.int64,
        var_lengths: T.handle,
        var_finding: T.handle,
    ):
        T.func_attr(_CPU)
        num_sequences = T.int64()
        indptr = match(var_indptr, (num_sequences + 1,), "int32")
        last_page_len = match(var_last_page_len, (num_sequences,), "int32")
        lengths = match(var_lengths, (num_sequences,), "int32")
        check = Check(match(var_finding, (3,), "int64"))
        check.ascends(indptr, num_sequences, T.int64(2**31 - 1), _INDPTR)
        if check.passed:
            for b in range(num_sequences):
                num_pages = T.cast(indptr[b + 1], "int64") - T.cast(indptr[b], "int64")
                last = T.cast(last_page_len[b], "int64")
                length: T.int64 = T.int64(0)
                if num_pages > 0:
                    check.require(last >= 0 and last <= page_size, Finding.LAST_PAGE_LEN, b, last)
                    length = (num_pages - 1) * page_size + last
                check.require(length < T.int64(2**31), Finding.OVERFLOW, b, length)
                lengths[b] = T.cast(length, "int32")

    return sequence_lengths


def batch_indices_positions():
    """Build the kernel that gives each appended row its sequence and position.

    Arguments: append_indptr int32 ``[B + 1]``, seq_lens int32 ``[B]`` (after the append),
    batch_indices and positions int32 ``[T]``, finding. Rows that belong to no sequence get -1, 0.
    """

    @prim_func
    def batch_indices_positions(
        var_append_indptr: T.handle,
        var_seq_lens: T.handle,
        var_batch_indices: T.handle,
        var_positions: T.handle,
        var_finding: T.handle,
    ):
        T.func_attr(_CPU)
        num_sequences, num_rows = T.int64(), T.int64()
        indptr = match(var_append_indptr, (num_sequences + 1,), "int32")
        seq_lens = match(var_seq_lens, (num_sequences,), "int32")
        batch_indices = match(var_batch_indices, (num_rows,), "int32")
        positions = match(var_positions, (num_rows,), "int32")
        check = Check(match(var_finding, (3,), "int64"))
        check.ascends(indptr, num_sequences, num_rows, _INDPTR)
        if check.passed:
            for b in range(num_sequences):
                count, length = indptr[b + 1] - indptr[b], seq_lens[b]
                check.require(length >= count, Finding.SEQ_LEN, b, length)
        if check.passed:
            for n in range(indptr[0]):
                batch_indices[n] = -1
                positions[n] = 0
            for n in range(T.cast(indptr[num_sequences], "int64"), num_rows):
                batch_indices[n] = -1
                positions[n] = 0
            num_tasks = tasks_for(num_rows)
            for task in T.parallel(num_tasks, annotations=TASKS):
                for b in range(num_sequences):
                    first, count = indptr[b], indptr[b + 1] - indptr[b]
                    shift = seq_lens[b] - indptr[b + 1]
                    for n in range(
                        first + cut(count, task, num_tasks), first + cut(count, task + 1, num_tasks)
                    ):
                        batch_indices[n] = T.cast(b, "int32")
                        positions[n] = n + shift

    return batch_indices_positions


def vector_sparse_offsets():
    """Build the kernel that spells a block-sparse table out, one offset for each position.

    Arguments: block indices int32 ``[N]`` and indptr ``[B + 1]``, offsets int32 ``[M]``, their
    indptr ``[B + 1]``, kv_lens int32 ``[B]``, stride_block, stride_n, block_size: int64, finding.
    Position i of sequence b has offset ``block * stride_block + (i % block_size) * stride_n``.
    """

    @prim_func
    def vector_sparse_offsets(
        var_blocks: T.handle,
        var_block_indptr: T.handle,
        var_offsets: T.handle,
        var_indptr: T.handle,
        var_kv_lens: T.handle,
        stride_block: T.int64,
        stride_n: T.int64,
        block_size: T.int64,
        var_finding: T.handle,
    ):
        T.func_attr(_CPU)
        num_sequences, num_blocks, num_offsets = T.int64(), T.int64(), T.int64()
        blocks = match(var_blocks, (num_blocks,), "int32")
        block_indptr = match(var_block_indptr, (num_sequences + 1,), "int32")
        offsets = match(var_offsets, (num_offsets,), "int32")
        indptr = match(var_indptr, (num_sequences + 1,), "int32")
        kv_lens = match(var_kv_lens, (num_sequences,), "int32")
        check = Check(match(var_finding, (3,), "int64"))
        check.ascends(block_indptr, num_sequences, num_blocks, _INDPTR)
        check.ascends(indptr, num_sequences, num_offsets, _OUTPUT_INDPTR)
        for b in range(num_sequences):
            if check.passed:
                length = T.cast(kv_lens[b], "int64")
                max_length = T.cast(block_indptr[b + 1] - block_indptr[b], "int64") * block_size
                check.require(length >= 0 and length <= max_length, Finding.KV_LEN, b, length)
                room = T.cast(indptr[b + 1] - indptr[b], "int64")
                check.require(length <= room, Finding.OUTPUT_ROOM, b, room)
                if check.passed:
                    for i in range(T.truncdiv(length + block_size - 1, block_size)):
                        entry = T.cast(block_indptr[b], "int64") + i
                        block = T.cast(blocks[entry], "int64")
                        check.require(block >= 0, Finding.PAGE, entry, block)
                        used = T.meta_var(T.min(block_size, length - i * block_size))
                        last = block * stride_block + (used - 1) * stride_n
                        check.require(last < T.int64(2**31), Finding.OVERFLOW, b, last)
        if check.passed:
            num_tasks = tasks_for(num_offsets)
            for task in T.parallel(num_tasks, annotations=TASKS):
                for b in range(num_sequences):
                    length = T.cast(kv_lens[b], "int64")
                    count = T.truncdiv(length + block_size - 1, block_size)
                    begin = cut(count, task, num_tasks, "int64")
                    end = cut(count, task + 1, num_tasks, "int64")
                    for i in range(begin, end):
                        first = T.cast(indptr[b], "int64") + i * block_size
                        block = T.cast(blocks[T.cast(block_indptr[b], "int64") + i], "int64")
                        for j in range(T.min(block_size, length - i * block_size)):
                            offsets[first + j] = T.cast(
                                block * stride_block + j * stride_n, "int32"
                            )

    return vector_sparse_offsets


def tasks_for(num_elements):
    """Return how many tasks write two int32 arrays of this length.

    Every task takes an equal range of every sequence, so a long one does not keep one task busy.
    """
    is_small = num_elements * 8 < SERIAL_BELOW_BYTES
    return index_temp(T.if_then_else(is_small, T.int32(1), T.int32(_NUM_TASKS)))


BUILDERS: dict[str, Callable] = {
    "row_slots": row_slots,
    "last_slots": last_slots,
    "sequence_lengths": sequence_lengths,
    "batch_indices_positions": batch_indices_positions,
    "vector_sparse_offsets": vector_sparse_offsets,
}
