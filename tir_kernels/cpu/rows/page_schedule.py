# SPDX-License-Identifier: Apache-2.0
"""The split of a batch's pages among decode tasks.

A pair is a sequence with some of the KV heads, its head split: all heads that a task has room for,
or fewer where the pages are too few to employ every task. The pages of all pairs, in the order of
sequences and heads, are cut into splits, which tasks take from a queue.

The pages of a sequence are segments, whose states are merged in order. They begin at multiples of a
number of pages that the length of the sequence decides, and a split has the segments whose first
pages it has. So where splits fall decides which task attends to a segment, but no bit of a result.
"""

from tvm.script import tirx as T

from ...script import inline
from ...spec import KernelSpec
from ..isa.simd import index_temp
from ..tasks import Splits, Workspace, cut, num_threads
from .local_rows import max_local_heads

SERIAL_ELEMENTS = 1 << 15  # elements of K below which a launch costs more than it saves
MIN_ELEMENTS = 1 << 16  # of K that are worth a split
SEGMENT = 256  # positions: a merge takes about a hundredth of the time of so many
MAX_SEGMENTS = 16  # of a sequence: those of longer ones are longer
# Fewer leave tasks of too different a size; with more, pairs have fewer heads, and so read pages in
# shorter pieces, up to 1.4 times as slowly.
SEGMENTS_PER_TASK = 4
MERGES_PER_TASK = 64  # of a row: fewer take less time than a launch


def segment_of(spec: KernelSpec, num_pages):
    """Return the pages of a segment of a sequence, int32."""
    least = SEGMENT // spec.page_size
    most = least * MAX_SEGMENTS
    return T.max((num_pages + most - 1) // most, 1) * least


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
            sequences = T.cast(T.max(self.batch_size, 1), "int64")
            of_pages = T.meta_var(pages // (SEGMENT // spec.page_size))
            segments = T.min(of_pages, sequences * MAX_SEGMENTS) + sequences
            wanted = T.meta_var((threads * SEGMENTS_PER_TASK + segments - 1) // segments)
            chosen = T.meta_var(T.cast(T.min(wanted, T.cast(heads, "int64")), "int32"))
            self.num_head_splits = T.max(fewest, chosen)
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
        The pages ``first_page .. last_page - 1`` of the sequence are those of the split's segments.
    segment : int32
        Pages of a segment; the last one of the sequence may have fewer.
    num_splits : int32
        Splits from the one that begins the pair to the one that ends it, or 0; set by `find_cut`.
    """

    def __init__(self, schedule: PageSchedule):
        self.schedule, self.page_indptr = schedule, schedule.page_indptr
        self.page, self.end = T.local_scalar("int64"), T.local_scalar("int64")  # of all pairs
        self.begin_of_sequence = T.local_scalar("int64")
        self.sequence, self.num_pages = T.local_scalar("int32"), T.local_scalar("int32")
        self.first_head, self.num_heads = T.local_scalar("int32"), T.local_scalar("int32")
        self.first_page, self.last_page = T.local_scalar("int32"), T.local_scalar("int32")
        self.segment, self.num_splits = (T.local_scalar("int32") for _ in range(2))

    @inline
    def begin(self):
        """Begin with the first sequence."""
        self.sequence = 0

    @inline
    def begin_split(self, split_id):
        """Start a split, which must come after the one before."""
        self.page = self.schedule.splits.first_item(split_id)
        self.end = self.schedule.splits.first_item(split_id + 1)

    def has_next(self):
        """Whether the split has another pair."""
        return self.page < self.end

    @inline
    def take(self):
        """Take the next pair of the split, which may have no segment of it."""
        self._find(self.page)
        at = self.page - self.begin_of_sequence
        self._set_heads(T.cast(at // self.num_pages, "int32"))
        first = T.cast(at % self.num_pages, "int32")
        last = T.min(T.cast(self.num_pages, "int64"), first + self.end - self.page)
        self.page += last - first
        self.segment = segment_of(self.schedule.spec, self.num_pages)
        self.first_page = self._begin_of_segment(first)
        self.last_page = self._begin_of_segment(T.cast(last, "int32"))

    def _begin_of_segment(self, page):
        """Return the first page of the first segment that does not begin before a page."""
        return T.min((page + self.segment - 1) // self.segment * self.segment, self.num_pages)

    @property
    def num_segments(self):
        """Return the number of segments of the pair that the split has."""
        return (self.last_page - self.first_page + self.segment - 1) // self.segment

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
        """Find the pair that is cut first at the end of a split; else it has no splits."""
        splits = T.meta_var(self.schedule.splits)
        self.num_splits = 0
        self.page = splits.first_item(split_id + 1)
        self._find(self.page)
        head_split = T.cast((self.page - self.begin_of_sequence) // self.num_pages, "int32")
        begin = self.begin_of_sequence + T.cast(head_split, "int64") * self.num_pages
        self.segment = segment_of(self.schedule.spec, self.num_pages)
        end_page = self._begin_of_segment(T.cast(self.page - begin, "int32"))
        is_first = T.And(self.page > begin, splits.first_item(split_id) <= begin)
        if T.And(is_first, end_page < self.num_pages):
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


@T.meta_class
class Slots:
    """The slots of `PartialStates` that the splits of a batch use.

    A split has one for the pair that it is at, from its first segment on. The segments with which
    it continues a pair that an earlier split began have one each, after that.

    Parameters
    ----------
    schedule : PageSchedule

    Attributes
    ----------
    num_slots : int32
    """

    def __init__(self, schedule: PageSchedule):
        self.schedule = schedule
        self._memory = Workspace(schedule.num_splits + 1, (1,), "int32", "numbers of slots")
        self._first = self._memory.buffer
        self.num_slots = T.local_scalar("int32")

    @inline
    def begin(self):
        """Count the slots."""
        pair, first = Pairs(self.schedule), T.meta_var(self._first)
        pair.begin()
        self.num_slots = 0
        for split_id in range(self.schedule.num_splits):
            first[T.cast(split_id, "int64"), 0] = self.num_slots
            self.num_slots += 1
            pair.begin_split(split_id)
            if pair.has_next():
                pair.take()
                if pair.first_page > 0:
                    self.num_slots += pair.num_segments
        first[T.cast(self.schedule.num_splits, "int64"), 0] = self.num_slots

    def num_merge_tasks(self, num_rows):
        """Return the number of tasks that merge states of `num_rows` rows."""
        merges = (self.num_slots - self.schedule.num_splits) * num_rows
        return T.max(T.min(merges // MERGES_PER_TASK, self.schedule.num_tasks), 1)

    @inline
    def free(self):
        """Give the memory back."""
        self._memory.free()

    def first(self, split_id):
        """Return the first slot of a split."""
        return self._first[T.cast(split_id, "int64"), 0]
