# SPDX-License-Identifier: Apache-2.0
"""The int32 arrays of a decode step, made on the GPU of those of the step before.

Where the same sequences append a row again, every number of the arrays follows from the last ones
and from the pages that sequences begin. So the host copies only these pages.
"""

from tvm.script import tirx as T

from ..define import attributes
from ..script import inline, prim_func
from ..signatures.arrays import match_int32, sizes
from ..spec import KernelSpec
from .emit import launch

THREADS = 128
# The changes of an array, numbered as in `ArrayChange` of `runtime_ext/step/array_changes.h`.
SAME, NEXT, LENGTHS, SLOTS, INDPTR, PAGE_IDS = range(6)
# Columns of `changes`.
KIND, SOURCE, SINK, SIZE, FIRST_BLOCK, GROUP, PAGE_INDPTR = range(7)
NUM_COLUMNS = 7


def advance_arrays(spec: KernelSpec):
    """Build the kernel that makes the arrays of a step of those of the step before.

    Arguments, all int32: last ``[n]`` and current ``[m]``, memory in which the arrays of both steps
    lie; changes ``[A, 7]``, a row for each array; new_rows ``[K]``, the sequences that begin a page
    in this step, in increasing order; new_page_ids ``[K, G]``, the page of each layer group that
    each of them begins; block_size, the number of elements that a block makes; num_blocks, of all
    arrays.

    A row of changes is the kind of the array, where it begins in `last` and in `current`, its new
    size, its first block, its layer group, and where the group's `page_indptr` begins in `last`.
    The kinds:

    - SAME: nothing changes.
    - NEXT: every number grows by one, as positions do.
    - LENGTHS: so do the slots in use on last pages, but those of new pages are one.
    - SLOTS: so do slots, but those of new pages are their first ones.
    - INDPTR: numbers grow by the new pages of the sequences before.
    - PAGE_IDS: new pages come behind the others of their sequences.
    """
    page_size = spec.page_size

    @prim_func
    def advance_arrays(
        var_last: T.handle,
        var_current: T.handle,
        var_changes: T.handle,
        var_new_rows: T.handle,
        var_new_page_ids: T.handle,
        block_size: T.int32,
        num_blocks: T.int32,
    ):
        T.func_attr(attributes(spec))
        num_last, num_current, num_arrays, num_groups, num_new = sizes(5)
        last = match_int32(var_last, num_last)
        current = match_int32(var_current, num_current)
        changes = match_int32(var_changes, num_arrays, NUM_COLUMNS)
        new_rows = match_int32(var_new_rows, num_new)
        new_page_ids = match_int32(var_new_page_ids, num_new, num_groups)
        with launch([num_blocks], THREADS) as ((block,), thread):
            array = 0
            while T.And(array + 1 < num_arrays, changes[array + 1, FIRST_BLOCK] <= block):
                array += 1
            kind, source, sink = changes[array, KIND], changes[array, SOURCE], changes[array, SINK]
            group, page_indptr = changes[array, GROUP], changes[array, PAGE_INDPTR]
            new_pages = NewPages(last, new_rows, page_indptr, kind == PAGE_IDS)
            begin = (block - changes[array, FIRST_BLOCK]) * block_size
            end = T.min(begin + block_size, changes[array, SIZE])
            min_before, max_before = 0, 0  # new pages before the block and before its end
            if kind >= LENGTHS:
                new_pages.count_before(begin, 0, num_new)
                min_before = new_pages.count
                new_pages.count_before(end, min_before, num_new)
                max_before = new_pages.count
            for i in T.serial(begin + thread, end, step=THREADS):
                new_pages.count_before(i, min_before, max_before)
                k = new_pages.count
                is_new, value = 0, 1
                if T.And(kind != INDPTR, k < max_before):
                    is_new = new_pages.is_at(k, i)
                if is_new == 0:
                    moved_by = T.if_then_else(kind == PAGE_IDS, k, 0)
                    value = last[source + i - moved_by]
                if T.And(is_new == 0, T.And(kind != SAME, kind != PAGE_IDS)):
                    value = value + T.if_then_else(kind == INDPTR, k, 1)
                if T.And(is_new != 0, kind != LENGTHS):
                    value = new_page_ids[k, group] * T.if_then_else(kind == SLOTS, page_size, 1)
                current[sink + i] = value

    return advance_arrays


@T.meta_class
class NewPages:
    """Counts the new pages that come before an element of an array.

    Parameters
    ----------
    last, new_rows : int32 Buffer
        As `advance_arrays` has them.
    page_indptr : int32
        Where the array of that name begins in `last`.
    counts_page_ids : bool expression
        Whether the elements are page ids, and not sequences.

    Attributes
    ----------
    count : int32
    """

    def __init__(self, last, new_rows, page_indptr, counts_page_ids):
        self.last, self.new_rows, self.page_indptr = last, new_rows, page_indptr
        self.counts_page_ids = counts_page_ids
        self.count, self.end = T.local_scalar("int32"), T.local_scalar("int32")

    def _element(self, k):
        """Return the element that belongs to new page k."""
        row = self.new_rows[k]
        is_moved = self.counts_page_ids
        return T.if_then_else(is_moved, self.last[self.page_indptr + row + 1] + k, row)

    @inline
    def count_before(self, element, minimum, maximum):
        """Set `count`, which lies between two bounds."""
        self.count = minimum
        self.end = maximum
        while self.count < self.end:
            middle = (self.count + self.end) // 2
            if self._element(middle) < element:
                self.count = middle + 1
            else:
                self.end = middle

    def is_at(self, k, element):
        """Return, as int32, whether an element belongs to new page k."""
        return T.cast(self._element(k) == element, "int32")
