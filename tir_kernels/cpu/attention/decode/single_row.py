# SPDX-License-Identifier: Apache-2.0
"""A sequence's only row of a step, for some of the KV heads, over some of its pages."""

from __future__ import annotations

from dataclasses import dataclass, replace

from tvm.script import tirx as T

from ....semantics.visibility import lengths_of
from ....signatures.inputs import PagedInputs
from ....spec import KernelSpec
from ...components.output import Output
from ...components.work import Queue, cut
from ...simd import index_temp
from ..kv_operands import single_row_operands
from ..kv_rows import PagedRows
from .blocking import Blocking
from .code_split import split_of
from .split import DecodeSplit
from .values import STRIP

SEQUENCES_PER_TASK = 8  # fewer would leave tasks of too different a size


@dataclass(frozen=True)
class SingleRow:
    """A sequence, its row in Q, and the KV heads of a split: int32 expressions."""

    sequence: object
    row: object
    first_head: object
    num_heads: object


@dataclass(frozen=True)
class Pages:
    """The pages ``first .. last - 1`` of `count`, which hold `kv_len` positions: int32."""

    first: object
    last: object
    count: object
    kv_len: object

    @property
    def is_whole(self):
        """Whether these are all pages of the sequence."""
        return self.last - self.first == self.count


def bind_lengths(spec: KernelSpec, a: PagedInputs) -> PagedInputs:
    """The inputs with their `lengths`."""
    return replace(a, lengths=lengths_of(spec, a, index_temp))


def paged_rows(spec: KernelSpec, a: PagedInputs, first_entry, num_pages, head) -> PagedRows:
    """The rows of a sequence that has `num_pages` pages, the table's from `first_entry` on."""
    return PagedRows(
        spec,
        a.pages,
        a.page_values,
        first_entry,
        first_entry + num_pages - 1,
        head=head,
        slot_of=a.lengths.slot_of,
    )


def heads_of(spec: KernelSpec, head_split, num_head_splits):
    """First KV head and number of heads of a head split, of `num_head_splits` of like size."""
    first = index_temp(cut(spec.num_kv_heads, head_split, num_head_splits))
    return first, index_temp(cut(spec.num_kv_heads, head_split + 1, num_head_splits) - first)


def attend_row(
    spec: KernelSpec, a: PagedInputs, split: DecodeSplit, which: SingleRow, pages: Pages
) -> None:
    """Attend from a cleared state, which is left in the split.

    A row of a sequence with a gap sees all that is held: between steps this is no more than the
    window.
    """
    kv_len, page_size, num_local_heads = pages.kv_len, spec.page_size, which.num_heads
    first_entry = index_temp(a.page_indptr[which.sequence])
    rows = paged_rows(spec, a, first_entry, pages.count, which.first_head)
    k_offset = index_temp(a.k_rope_pos_offset[which.sequence])
    begin = index_temp(pages.first * page_size)
    end = index_temp(T.min(pages.last * page_size, kv_len))

    def run(first_visible, end=end, k_offset=k_offset):
        first_visible = index_temp(first_visible)
        restart = index_temp(first_visible // STRIP * STRIP)
        first = index_temp(T.max(begin, restart))
        end = T.max(first, end)
        split.run(a, rows, first, end, k_offset, first_visible, num_local_heads, restart)

    gap = a.gap(which.sequence)
    num_hidden = 0 if gap is None else gap.begin - gap.sinks
    a.rope.begin_sequence(k_offset + kv_len - num_hidden)
    a.mask.begin_sequence(which.sequence, kv_len)
    with T.serial(num_local_heads) as local_head:
        split.start(a, which.row, which.first_head + local_head, local_head)
    if a.mask.has_window:
        run(a.mask.begin(0, 1, kv_len))
    elif gap is None:
        split.run(a, rows, begin, end, k_offset, num_local_heads=num_local_heads)
    else:
        gap.for_spans(
            kv_len, k_offset, lambda span: run(span.begin, T.min(end, span.end), span.k_offset)
        )
    num_rows = num_local_heads * split.blocking.padded_rows
    split.values.in_column_order(num_rows)
    if a.rope.restores:
        with T.serial(num_rows) as row:
            a.rope.restore(split.o, row)


class Singles:
    """The sequences of a batch that have one row, among others with more.

    Parameters
    ----------
    spec : KernelSpec
    ops : operands object
        Those of the other sequences.
    a : the kernel's arguments, with `lengths`.
    """

    def __init__(self, spec: KernelSpec, ops, a: PagedInputs):
        self.spec, self.a, self.output = spec, a, Output(spec, a.o, a.lse)
        self.ops = single_row_operands(spec, ops, a.lengths.slot_of is not None)

    def has(self, sequence):
        """Whether it has one row, which sees all that is held."""
        a = self.a
        row, gap = index_temp(a.q_indptr[sequence]), a.gap(sequence)
        is_single = a.q_indptr[sequence + 1] - row == 1
        if gap is None:
            return is_single
        own = a.mask.own(0, 1, self._pages(sequence).kv_len)
        is_recent = a.q_rope_position[row] <= gap.sinks + gap.back
        return T.And(is_single, T.And(own - gap.back <= gap.begin, is_recent))

    def begin_task(self) -> None:
        """Make the buffers of a task."""
        self.num_local_heads = Blocking.of(self.spec).max_local_heads(self.spec)
        self.split = split_of(self.spec, self.ops, self.a.sm_scale, self.num_local_heads)

    def attend(self, queue: Queue, num_tasks) -> None:
        """Attend and store, for the sequences and KV heads that a task takes."""
        spec, a, heads = self.spec, self.a, self.spec.num_kv_heads
        is_enough = a.batch_size >= num_tasks * SEQUENCES_PER_TASK
        num_head_splits = -(-heads // self.num_local_heads)
        num_head_splits = index_temp(T.if_then_else(is_enough, num_head_splits, heads))

        def attend_pair(sequence, head_split):
            first_head, num_heads = heads_of(spec, head_split, num_head_splits)
            row = index_temp(a.q_indptr[sequence])
            which = SingleRow(sequence, row, first_head, num_heads)
            attend_row(spec, a, self.split, which, self._pages(sequence))
            num_rows = index_temp(num_heads * spec.group_size)
            with T.serial(num_rows) as i:
                head = first_head * spec.group_size + i
                self.output.finish(row, head, self.split.o, *self.split.query_row(i))

        queue.for_items(
            a.batch_size, lambda b: T.if_then_else(self.has(b), num_head_splits, 0), attend_pair
        )

    def _pages(self, sequence) -> Pages:
        count = index_temp(self.a.page_indptr[sequence + 1] - self.a.page_indptr[sequence])
        return Pages(0, count, count, self.a.lengths.kv_len(sequence, count))
