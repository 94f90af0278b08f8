# SPDX-License-Identifier: Apache-2.0
"""The split of a batch's pages among decode tasks.

A pair is a sequence with some of the KV heads, its head split: all heads that a task has room for,
or one where the pages are too few to employ every task. The pages of all pairs, in the order of
sequences and heads, are cut into splits, which tasks take from a queue.
"""

from __future__ import annotations

from collections.abc import Callable

from tvm.script import tirx as T

from ....signatures.inputs import PagedInputs
from ....spec import KernelSpec
from ...components.work import Splits, num_threads
from ...simd import Register, index_temp, wide_temp
from .single_row import Pages, SingleRow, heads_of

SERIAL_ELEMENTS = 1 << 15  # elements of K below which a launch costs more than it saves
MIN_ELEMENTS = 1 << 16  # of K that are worth a split
PAGES_PER_TASK = 16  # fewer would leave tasks of too different a size


class PageSchedule:
    """The splits of a batch.

    Parameters
    ----------
    spec : KernelSpec
    a : PagedInputs
        With `lengths`.
    max_local_heads : int
        KV heads that a task has room for.

    Attributes
    ----------
    num_tasks : int32 expression
    """

    def __init__(self, spec: KernelSpec, a: PagedInputs, max_local_heads: int):
        self.spec, self.a, heads = spec, a, spec.num_kv_heads
        # Pages times KV heads may exceed 32 bits.
        pages = wide_temp(a.page_indptr[a.batch_size])
        threads = num_threads()
        num_head_splits = -(-heads // max_local_heads)
        if max_local_heads > 1:
            is_enough = pages * num_head_splits >= threads * PAGES_PER_TASK
            num_head_splits = index_temp(T.if_then_else(is_enough, num_head_splits, heads))
        total = wide_temp(pages * num_head_splits)
        elements = pages * (heads * spec.page_size * spec.qk_head_dim)
        max_tasks = T.cast(T.min(T.cast(threads, "int64"), total), "int32")
        self.num_tasks = index_temp(T.if_then_else(elements > SERIAL_ELEMENTS, max_tasks, 1))
        # A split reads as much, however many heads a pair has.
        heads_of_pair = (heads + num_head_splits - 1) // num_head_splits
        min_pages = T.max(1, MIN_ELEMENTS // (heads_of_pair * spec.page_size * spec.qk_head_dim))
        self.splits = Splits(total, self.num_tasks)
        self.splits.begin(index_temp(min_pages))
        self.num_head_splits = num_head_splits

    @property
    def num_splits(self):
        """Return the number of splits, int32."""
        return self.splits.count

    def for_pairs(
        self, split_id, sequence: Register, body: Callable[[SingleRow, Pages], None]
    ) -> None:
        """Emit ``body(row, pages)`` for the pairs of a split, with the pages that are in it.

        `sequence` is the last one that the task has looked at, 0 at first.
        """
        current = Register(1, "int64", self.splits.first_item(split_id))
        end = self.splits.first_item(split_id + 1)
        with T.While(current.get() < end):
            self._skip_to(sequence, current.get())
            b = index_temp(sequence.get())
            first, num_pages = self._pages_of(b)
            at = wide_temp(current.get() - first)
            head_split = index_temp(T.cast(at // num_pages, "int32"))
            first_head, num_heads = heads_of(self.spec, head_split, self.num_head_splits)
            first_page = index_temp(T.cast(at % num_pages, "int32"))
            last_page = T.min(T.cast(num_pages, "int64"), first_page + end - current.get())
            last_page = index_temp(T.cast(last_page, "int32"))
            kv_len = self.a.lengths.kv_len(b, num_pages)
            row = SingleRow(b, b, first_head, num_heads)
            body(row, Pages(first_page, last_page, num_pages, kv_len))
            current.set(current.get() + (last_page - first_page))

    def for_cut_pairs(self, body: Callable) -> None:
        """Emit ``body(row, first_split, num_splits)`` for the pairs that several splits share.

        They are found by the ends of splits within them.
        """
        sequence = Register(1, "int32", T.int32(0))
        with T.serial(self.num_splits - 1) as split_id:
            cut = self.splits.first_item(split_id + 1)
            self._skip_to(sequence, cut)
            first, num_pages = self._pages_of(sequence.get())
            head_split = index_temp(T.cast((cut - first) // num_pages, "int32"))
            begin = wide_temp(first + T.cast(head_split, "int64") * num_pages)
            # Of the cuts in a pair only the first one counts.
            with T.If(T.And(cut > begin, self.splits.first_item(split_id) <= begin)), T.Then():
                num_splits = Register(1, "int32", T.int32(1))
                next_begin = Register(1, "int64", cut)
                with T.While(next_begin.get() < begin + num_pages):
                    num_splits.set(num_splits.get() + 1)
                    next_begin.set(self.splits.first_item(split_id + num_splits.get()))
                heads = heads_of(self.spec, head_split, self.num_head_splits)
                row = SingleRow(sequence.get(), sequence.get(), *heads)
                body(row, split_id, num_splits.get())

    def _skip_to(self, sequence: Register, page) -> None:
        """Move on to the sequence that has a page, counted over all pairs."""

        def end():
            last = T.cast(self.a.page_indptr[sequence.get() + 1], "int64")
            return last * self.num_head_splits

        with T.While(end() <= page):
            sequence.set(sequence.get() + 1)

    def _pages_of(self, sequence):
        """The first page of a sequence, counted over all pairs, and the number of its pages."""
        first = index_temp(self.a.page_indptr[sequence])
        count = index_temp(self.a.page_indptr[sequence + 1] - first)
        return wide_temp(T.cast(first, "int64") * self.num_head_splits), count
