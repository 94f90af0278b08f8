# SPDX-License-Identifier: Apache-2.0
"""The split of a batch's pages among decode tasks.

A pair is a sequence with some of the KV heads, its head split: all heads that a task has room for,
or one where the pages are too few to employ every task. The pages of all pairs, in the order of
sequences and heads, are cut into splits, which tasks take from a queue.
"""

from tvm.script import tirx as T

from ...script import inline
from ...spec import KernelSpec
from ..simd import index_temp
from .query_rows import max_local_heads
from .work import Splits, cut, num_threads

SERIAL_ELEMENTS = 1 << 15  # elements of K below which a launch costs more than it saves
MIN_ELEMENTS = 1 << 16  # of K that are worth a split
PAGES_PER_TASK = 16  # fewer would leave tasks of too different a size


@T.meta_class
class PageSchedule:
    """The splits of a batch.

    Parameters
    ----------
    spec : KernelSpec
    page_indptr : int32 ``[batch_size + 1]``
    batch_size : int32
        Sequences, each of which is one of the page tables of a row of Q.
    tables_per_row : int32 expression, optional
        Page tables of a row, each for as many of its KV heads; None: one for all heads.

    Attributes
    ----------
    heads : int, or int32 expression
        KV heads of a sequence.
    num_head_splits : int, or int32 expression
        Pairs of a sequence.
    num_tasks : int32
    """

    def __init__(self, spec: KernelSpec, page_indptr, batch_size, tables_per_row=None):
        self.spec, self.page_indptr, self.batch_size = spec, page_indptr, batch_size
        self.tables_per_row = tables_per_row
        self.total, self.num_tasks = T.local_scalar("int64"), T.local_scalar("int32")
        self.heads = spec.num_kv_heads
        if tables_per_row is not None:
            self.heads = T.local_scalar("int32")
        self.num_head_splits = self.heads
        if max_local_heads(spec) > 1:
            self.num_head_splits = T.local_scalar("int32")
        self.splits = Splits(self.total, self.num_tasks)

    @inline
    def begin(self):
        """Cut the pages."""
        spec, heads = T.meta_var((self.spec, self.heads))
        if self.tables_per_row is not None:
            self.heads = spec.num_kv_heads // self.tables_per_row
        # Pages times KV heads may exceed 32 bits.
        pages = T.cast(self.page_indptr[self.batch_size], "int64")
        threads = T.cast(num_threads(), "int64")
        if max_local_heads(spec) > 1:
            most = T.meta_var(max_local_heads(spec))
            fewest = T.meta_var((heads + most - 1) // most)
            is_enough = T.meta_var(pages * fewest >= threads * PAGES_PER_TASK)
            self.num_head_splits = T.if_then_else(is_enough, fewest, heads)
        self.total = pages * self.num_head_splits
        elements = T.meta_var(pages * (heads * spec.page_size * spec.qk_head_dim))
        max_tasks = T.meta_var(T.cast(T.min(threads, self.total), "int32"))
        self.num_tasks = T.if_then_else(elements > T.int64(SERIAL_ELEMENTS), max_tasks, 1)
        # A split reads as much, however many heads a pair has.
        heads_of_pair = T.meta_var((heads + self.num_head_splits - 1) // self.num_head_splits)
        elements_of_page = T.meta_var(heads_of_pair * (spec.page_size * spec.qk_head_dim))
        self.splits.begin(T.max(1, MIN_ELEMENTS // elements_of_page))

    @property
    def num_splits(self):
        """Return the number of splits, int32."""
        return self.splits.count

    def row_of(self, sequence):
        """The row of Q of a sequence."""
        return sequence if self.tables_per_row is None else sequence // self.tables_per_row

    def first_head_of(self, sequence):
        """The first KV head of a sequence."""
        return 0 if self.tables_per_row is None else sequence % self.tables_per_row * self.heads


@T.meta_class
class Pairs:
    """The pair that a task is at, one after another.

    Parameters
    ----------
    schedule : PageSchedule

    Attributes
    ----------
    sequence, first_head, num_heads : int32
        The pair; heads are KV heads, counted over all heads of the row.
    num_pages : int32
        Pages of the sequence.
    first_page, last_page : int32
        The pages ``first_page .. last_page - 1`` of the sequence are in the split.
    num_splits : int32
        Splits that share the pair; set by `find_cut`.
    """

    def __init__(self, schedule: PageSchedule):
        self.schedule, self.page_indptr = schedule, schedule.page_indptr
        self.page, self.end = T.local_scalar("int64"), T.local_scalar("int64")  # of all pairs
        self.begin_of_sequence = T.local_scalar("int64")
        self.sequence, self.num_pages = T.local_scalar("int32"), T.local_scalar("int32")
        self.first_head, self.num_heads = T.local_scalar("int32"), T.local_scalar("int32")
        self.first_page, self.last_page = T.local_scalar("int32"), T.local_scalar("int32")
        self.num_splits = T.local_scalar("int32")

    @inline
    def begin(self):
        """Begin with the first sequence."""
        self.sequence = 0

    @inline
    def begin_split(self, split_id):
        """Go on with a split; a later one than before."""
        self.page = self.schedule.splits.first_item(split_id)
        self.end = self.schedule.splits.first_item(split_id + 1)

    def has_next(self):
        """Whether the split has another pair."""
        return self.page < self.end

    @inline
    def take(self):
        """Go on with the next pair of the split."""
        self._find(self.page)
        at = self.page - self.begin_of_sequence
        self._set_heads(T.cast(at // self.num_pages, "int32"))
        self.first_page = T.cast(at % self.num_pages, "int32")
        last = T.min(T.cast(self.num_pages, "int64"), self.first_page + self.end - self.page)
        self.last_page = T.cast(last, "int32")
        self.page += self.last_page - self.first_page

    @property
    def row(self):
        """Return the row of Q."""
        if self.schedule.tables_per_row is None:
            return self.sequence
        return index_temp(self.schedule.row_of(self.sequence))

    @property
    def is_whole(self):
        """Whether all pages of the sequence are in the split."""
        return self.last_page - self.first_page == self.num_pages

    @inline
    def find_cut(self, split_id):
        """Go on with the pair that is cut first at the end of a split; else it has no splits."""
        splits = T.meta_var(self.schedule.splits)
        self.num_splits = 0
        self.page = splits.first_item(split_id + 1)
        self._find(self.page)
        head_split = T.cast((self.page - self.begin_of_sequence) // self.num_pages, "int32")
        begin = self.begin_of_sequence + T.cast(head_split, "int64") * self.num_pages
        if self.page > begin and splits.first_item(split_id) <= begin:
            self._set_heads(head_split)
            self.num_splits = 1
            while self.page < begin + self.num_pages:
                self.num_splits += 1
                self.page = splits.first_item(split_id + self.num_splits)

    @inline
    def _find(self, page):
        """Move on to the sequence that has a page, counted over all pairs."""
        num_head_splits = T.meta_var(self.schedule.num_head_splits)
        while T.cast(self.page_indptr[self.sequence + 1], "int64") * num_head_splits <= page:
            self.sequence += 1
        first = self.page_indptr[self.sequence]
        self.num_pages = self.page_indptr[self.sequence + 1] - first
        self.begin_of_sequence = T.cast(first, "int64") * num_head_splits

    @inline
    def _set_heads(self, head_split):
        heads, num_head_splits = T.meta_var((self.schedule.heads, self.schedule.num_head_splits))
        self.first_head = cut(heads, head_split, num_head_splits)
        self.num_heads = cut(heads, head_split + 1, num_head_splits) - self.first_head
        if self.schedule.tables_per_row is not None:
            self.first_head += self.schedule.first_head_of(self.sequence)
