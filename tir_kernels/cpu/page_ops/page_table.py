# SPDX-License-Identifier: Apache-2.0
"""Arithmetic on page tables: slots of rows, lengths, positions, vector-sparse offsets.

A page table of B sequences is three int32 arrays: ``indices [N]`` (pages, in order of position),
``indptr [B + 1]`` (sequence b has ``indices[indptr[b] : indptr[b + 1]]``) and ``last_page_len [B]``
(slots in use in the last of them; of no meaning where there is none).

Every kernel checks what it is given and takes an int64 ``[3]`` of zeros last: a `Finding`, the
index at which it was made, and the offending number. A kernel that makes one writes nothing else
that matters, and reads nothing out of bounds.
"""

from __future__ import annotations

import enum
from collections.abc import Callable

from tvm.script import tirx as T

from .. import simd
from ..components.rows import SERIAL_BELOW_BYTES
from .arrays import match

_NUM_TASKS = 32  # of each sequence, where there is enough for several threads
_I64 = "int64"


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


class _Check:
    """Records the first finding; `passed` is whether there is none so far."""

    def __init__(self, handle):
        self.found = match(handle, (3,), _I64)

    def require(self, condition, finding: Finding, index, value) -> None:
        with T.If(T.And(self.found[0] == T.int64(0), T.Not(condition))), T.Then():
            for slot, x in enumerate((T.int64(int(finding)), index, value)):
                T.buffer_store(self.found, T.cast(x, _I64), [slot])

    @property
    def passed(self):
        return self.found[0] == T.int64(0)

    def ascends(
        self, indptr, count, limit, findings=(Finding.INDPTR_ORDER, Finding.INDPTR_END)
    ) -> None:
        """``0 <= indptr[0] <= ... <= indptr[count] <= limit``."""
        order, end = findings
        before = simd.Register(1, _I64, init=T.int64(0))
        with T.serial(count + 1) as i:
            here = simd.temp(T.cast(indptr[i], _I64), 1, _I64)
            self.require(here >= before.get(), order, i, here)
            self.require(here <= limit, end, i, here)
            before.set(here)


def _wide(value):
    """Materialise an index as int64."""
    return simd.temp(T.cast(value, _I64), 1, _I64)


def _vector(handle, length):
    return match(handle, (length,), "int32")


class _Table:
    """The page table of a batch, matched."""

    def __init__(self, indices_handle, indptr_handle, last_handle):
        self.num_sequences, self.num_entries = T.int64(), T.int64()
        self.indptr = _vector(indptr_handle, self.num_sequences + 1)
        self.last_page_len = _vector(last_handle, self.num_sequences)
        self.indices = _vector(indices_handle, self.num_entries)

    def check(self, check: _Check, page_size, minimum: int = 0) -> None:
        check.ascends(self.indptr, self.num_sequences, self.num_entries)
        with T.If(check.passed), T.Then(), T.serial(self.num_sequences) as b:
            begin, end = _wide(self.indptr[b]), _wide(self.indptr[b + 1])
            last = _wide(self.last_page_len[b])
            fits = T.And(last >= T.int64(minimum), last <= page_size)
            check.require(T.Or(begin == end, fits), Finding.LAST_PAGE_LEN, b, last)

    def write_slot(self, check: _Check, slots, n, entry, offset, num_pages) -> None:
        """Store slot `offset` of the page of table entry `entry`, which is valid, as slot `n`."""
        page = _wide(self.indices[entry])
        is_page = T.And(page >= T.int64(0), page < num_pages)
        check.require(is_page, Finding.PAGE, entry, page)
        _store_slot(slots, n, page, offset)


def _store_slot(slots, n, page, offset) -> None:
    T.buffer_store(slots, T.cast(page, "int32"), [n, 0])
    T.buffer_store(slots, T.cast(offset, "int32"), [n, 1])


def row_slots():
    """Build the kernel that finds the slots of rows given by sequence and position.

    Arguments: batch_indices int32 ``[T]`` (-1: no slot), positions int32 ``[T]``, the page table
    (indices, indptr, last_page_len), num_pages and page_size: int64, slots int32 ``[T, 2]``
    (page or -1, offset in it), finding.
    """

    def body(handles, num_pages, page_size) -> None:
        batch_handle, positions_handle, *table_handles, slots_handle, found_handle = handles
        num_rows = T.int64()
        batch_indices = _vector(batch_handle, num_rows)
        positions = _vector(positions_handle, num_rows)
        table = _Table(*table_handles)
        slots = match(slots_handle, (num_rows, 2), "int32")
        check = _Check(found_handle)
        table.check(check, page_size)

        def find_slot(n, b) -> None:
            begin, end = _wide(table.indptr[b]), _wide(table.indptr[b + 1])
            position = _wide(positions[n])
            inside = T.And(position >= T.int64(0), position < (end - begin) * page_size)
            check.require(inside, Finding.POSITION, n, position)
            with T.If(check.passed), T.Then():
                entry = _wide(begin + T.truncdiv(position, page_size))
                offset = T.truncmod(position, page_size)
                table.write_slot(check, slots, n, entry, offset, num_pages)

        with T.If(check.passed), T.Then(), T.serial(num_rows) as n:
            b = _wide(batch_indices[n])
            known = T.And(b >= T.int64(-1), b < table.num_sequences)
            check.require(known, Finding.BATCH_INDEX, n, b)
            _store_slot(slots, n, T.int64(-1), T.int64(0))
            with T.If(T.And(check.passed, b >= T.int64(0))), T.Then():
                find_slot(n, b)

    @T.prim_func(s_tir=True, private=True)
    def kernel(
        batch_indices: T.handle,
        positions: T.handle,
        indices: T.handle,
        indptr: T.handle,
        last_page_len: T.handle,
        num_pages: T.int64,
        page_size: T.int64,
        slots: T.handle,
        finding: T.handle,
    ):
        T.func_attr({"tirx.is_scheduled": True, "tirx.noalias": True})
        table = (indices, indptr, last_page_len)
        body((batch_indices, positions, *table, slots, finding), num_pages, page_size)

    return kernel


def last_slots():
    """Build the kernel that finds the slot of each sequence's last position.

    Arguments: the page table (indices, indptr, last_page_len; no sequence is empty), num_pages and
    page_size: int64, slots int32 ``[B, 2]`` (page, offset in it), finding.
    """

    def body(handles, num_pages, page_size) -> None:
        *table_handles, slots_handle, found_handle = handles
        table = _Table(*table_handles)
        slots = match(slots_handle, (table.num_sequences, 2), "int32")
        check = _Check(found_handle)
        table.check(check, page_size, minimum=1)
        with T.If(check.passed), T.Then(), T.serial(table.num_sequences) as b:
            begin, end = _wide(table.indptr[b]), _wide(table.indptr[b + 1])
            check.require(end > begin, Finding.NO_PAGE, b, end - begin)
            with T.If(check.passed), T.Then():
                offset = table.last_page_len[b] - 1
                table.write_slot(check, slots, b, end - 1, offset, num_pages)

    @T.prim_func(s_tir=True, private=True)
    def kernel(
        indices: T.handle,
        indptr: T.handle,
        last_page_len: T.handle,
        num_pages: T.int64,
        page_size: T.int64,
        slots: T.handle,
        finding: T.handle,
    ):
        T.func_attr({"tirx.is_scheduled": True, "tirx.noalias": True})
        body((indices, indptr, last_page_len, slots, finding), num_pages, page_size)

    return kernel


def sequence_lengths():
    """Build the kernel that computes lengths; 0 for a sequence without a page.

    Arguments: indptr, last_page_len, page_size: int64, lengths int32 ``[B]``, finding.
    """

    def body(indptr_handle, last_handle, lengths_handle, found_handle, page_size) -> None:
        num_sequences = T.int64()
        indptr = _vector(indptr_handle, num_sequences + 1)
        last_page_len = _vector(last_handle, num_sequences)
        lengths = _vector(lengths_handle, num_sequences)
        check = _Check(found_handle)
        check.ascends(indptr, num_sequences, T.int64(2**31 - 1))
        with T.If(check.passed), T.Then(), T.serial(num_sequences) as b:
            num_pages = _wide(indptr[b + 1]) - _wide(indptr[b])
            last = _wide(last_page_len[b])
            length = _wide(T.Select(num_pages > 0, (num_pages - 1) * page_size + last, T.int64(0)))
            fits = T.And(last >= T.int64(0), last <= page_size)
            check.require(T.Or(num_pages == 0, fits), Finding.LAST_PAGE_LEN, b, last)
            check.require(length < T.int64(2**31), Finding.OVERFLOW, b, length)
            T.buffer_store(lengths, T.cast(length, "int32"), [b])

    @T.prim_func(s_tir=True, private=True)
    def kernel(
        indptr: T.handle,
        last_page_len: T.handle,
        page_size: T.int64,
        lengths: T.handle,
        finding: T.handle,
    ):
        T.func_attr({"tirx.is_scheduled": True, "tirx.noalias": True})
        body(indptr, last_page_len, lengths, finding, page_size)

    return kernel


def batch_indices_positions():
    """Build the kernel that gives each appended row its sequence and position.

    Arguments: append_indptr int32 ``[B + 1]``, seq_lens int32 ``[B]`` (after the append),
    batch_indices and positions int32 ``[T]``, finding. Rows that belong to no sequence get -1, 0.
    """

    def body(indptr_handle, lens_handle, batch_handle, positions_handle, found_handle) -> None:
        num_sequences, num_rows = T.int64(), T.int64()
        indptr = _vector(indptr_handle, num_sequences + 1)
        seq_lens = _vector(lens_handle, num_sequences)
        batch_indices = _vector(batch_handle, num_rows)
        positions = _vector(positions_handle, num_rows)
        check = _Check(found_handle)
        check.ascends(indptr, num_sequences, num_rows)
        with T.If(check.passed), T.Then(), T.serial(num_sequences) as b:
            count, length = _wide(indptr[b + 1]) - _wide(indptr[b]), _wide(seq_lens[b])
            check.require(length >= count, Finding.SEQ_LEN, b, length)

        def fill(b, begin, end) -> None:
            first = _wide(indptr[b])
            shift = _wide(T.cast(seq_lens[b], _I64) - T.cast(indptr[b + 1], _I64))
            with T.serial(end - begin) as i:
                row = first + begin + i
                T.buffer_store(batch_indices, T.cast(b, "int32"), [row])
                T.buffer_store(positions, T.cast(row + shift, "int32"), [row])

        def fill_unowned(begin, end) -> None:
            with T.serial(end - begin) as i:
                T.buffer_store(batch_indices, T.int32(-1), [begin + i])
                T.buffer_store(positions, T.int32(0), [begin + i])

        with T.If(check.passed), T.Then():
            fill_unowned(T.int64(0), _wide(indptr[0]))
            fill_unowned(_wide(indptr[num_sequences]), num_rows)
            _for_each_task(
                num_sequences, num_rows, lambda b: T.cast(indptr[b + 1] - indptr[b], _I64), fill
            )

    @T.prim_func(s_tir=True, private=True)
    def kernel(
        append_indptr: T.handle,
        seq_lens: T.handle,
        batch_indices: T.handle,
        positions: T.handle,
        finding: T.handle,
    ):
        T.func_attr({"tirx.is_scheduled": True, "tirx.noalias": True})
        body(append_indptr, seq_lens, batch_indices, positions, finding)

    return kernel


def vector_sparse_offsets():
    """Build the kernel that spells a block-sparse table out, one offset for each position.

    Arguments: block indices int32 ``[N]`` and indptr ``[B + 1]``, offsets int32 ``[M]``, their
    indptr ``[B + 1]``, kv_lens int32 ``[B]``, stride_block, stride_n, block_size: int64, finding.
    Position i of sequence b has offset ``block * stride_block + (i % block_size) * stride_n``.
    """

    def body(handles, stride_block, stride_n, block_size) -> None:
        blocks_handle, block_indptr_handle, out_handle, indptr_handle, lens_handle, found = handles
        num_sequences, num_blocks, num_offsets = T.int64(), T.int64(), T.int64()
        block_indptr = _vector(block_indptr_handle, num_sequences + 1)
        blocks = _vector(blocks_handle, num_blocks)
        indptr = _vector(indptr_handle, num_sequences + 1)
        offsets = _vector(out_handle, num_offsets)
        kv_lens = _vector(lens_handle, num_sequences)
        check = _Check(found)
        check.ascends(block_indptr, num_sequences, num_blocks)
        output_findings = (Finding.OUTPUT_ORDER, Finding.OUTPUT_END)
        check.ascends(indptr, num_sequences, num_offsets, output_findings)

        def blocks_of(b):
            return T.truncdiv(T.cast(kv_lens[b], _I64) + block_size - 1, block_size)

        def check_sequence(b) -> None:
            length = _wide(kv_lens[b])
            slots = (_wide(block_indptr[b + 1]) - _wide(block_indptr[b])) * block_size
            fits = T.And(length >= T.int64(0), length <= slots)
            check.require(fits, Finding.KV_LEN, b, length)
            room = _wide(T.cast(indptr[b + 1], _I64) - T.cast(indptr[b], _I64))
            check.require(length <= room, Finding.OUTPUT_ROOM, b, room)
            with T.If(check.passed), T.Then(), T.serial(blocks_of(b)) as i:
                entry = _wide(T.cast(block_indptr[b], _I64) + i)
                block = _wide(blocks[entry])
                check.require(block >= T.int64(0), Finding.PAGE, entry, block)
                used = T.min(block_size, length - i * block_size)
                last = block * stride_block + (used - 1) * stride_n
                check.require(last < T.int64(2**31), Finding.OVERFLOW, b, last)

        with T.serial(num_sequences) as b, T.If(check.passed), T.Then():
            check_sequence(b)

        def fill(b, begin, end) -> None:
            first_block, first_offset = _wide(block_indptr[b]), _wide(indptr[b])
            length = _wide(kv_lens[b])
            with T.serial(end - begin) as i:
                at = _wide((begin + i) * block_size)
                base = _wide(T.cast(blocks[first_block + begin + i], _I64) * stride_block)
                with T.serial(T.min(block_size, length - at)) as j:
                    value = T.cast(base + j * stride_n, "int32")
                    T.buffer_store(offsets, value, [first_offset + at + j])

        with T.If(check.passed), T.Then():
            _for_each_task(num_sequences, num_offsets, blocks_of, fill)

    @T.prim_func(s_tir=True, private=True)
    def kernel(
        blocks: T.handle,
        block_indptr: T.handle,
        offsets: T.handle,
        indptr: T.handle,
        kv_lens: T.handle,
        stride_block: T.int64,
        stride_n: T.int64,
        block_size: T.int64,
        finding: T.handle,
    ):
        T.func_attr({"tirx.is_scheduled": True, "tirx.noalias": True})
        handles = (blocks, block_indptr, offsets, indptr, kv_lens, finding)
        body(handles, stride_block, stride_n, block_size)

    return kernel


def _for_each_task(num_sequences, num_elements, count_of: Callable, body: Callable) -> None:
    """Run ``body(b, begin, end)`` on ranges that cover ``range(count_of(b))`` of each sequence b.

    Every task takes an equal range of every sequence, so a long one does not keep one task busy.
    """
    with T.If(num_elements * 8 < SERIAL_BELOW_BYTES):
        with T.Then(), T.serial(num_sequences) as b:
            body(b, T.int64(0), _wide(count_of(b)))
        with T.Else(), T.parallel(T.int64(_NUM_TASKS)) as task, T.serial(num_sequences) as b:
            count = _wide(count_of(b))
            begin = _wide(T.truncdiv(count * task, T.int64(_NUM_TASKS)))
            end = _wide(T.truncdiv(count * (task + 1), T.int64(_NUM_TASKS)))
            body(b, begin, end)


BUILDERS: dict[str, Callable] = {
    "row_slots": row_slots,
    "last_slots": last_slots,
    "sequence_lengths": sequence_lengths,
    "batch_indices_positions": batch_indices_positions,
    "vector_sparse_offsets": vector_sparse_offsets,
}
