# SPDX-License-Identifier: Apache-2.0
"""Lists of positions of each row of Q, as slots of its sequence's pages."""

from tvm.script import tirx as T

from ...script import inline
from ...semantics.visibility import RaggedSequence
from ...spec import KernelSpec
from ..tasks import TASKS, Workspace, cut, num_threads

SERIAL_POSITIONS = 1 << 15  # below which a launch costs more than it saves


@T.meta_class
class SlotLists:
    """The slots that the rows of a call attend to: CSR, a list for each row.

    Positions that a row does not see, and negative ones, are left out.

    Parameters
    ----------
    spec : KernelSpec
    a : PagedInputs
        With `sequences`; `positions` are int32 ``[num_rows, width]``.
    num_rows, width : int32

    Attributes
    ----------
    count : int32
        Number of lists: `num_rows`.
    indptr : int32 Buffer ``[num_rows + 1]``
    values : int32 Buffer ``[indptr[num_rows]]``
        The slots.
    sequences : RaggedSequence
        Lengths of the lists.
    """

    def __init__(self, spec: KernelSpec, a, positions, num_rows, width):
        self.spec, self.a, self.positions = spec, a, positions
        self.num_rows, self.width, self.count = num_rows, width, num_rows
        self.sequences = RaggedSequence()
        self._indptr = Workspace(num_rows + 1, (), "int32", "lists of positions")
        self._slots = Workspace(num_rows * width, (), "int32", "lists of positions")
        self.indptr, self.values = self._indptr.buffer, self._slots.buffer

    @inline
    def free(self):
        """Give the memory back."""
        self._slots.free()
        self._indptr.free()

    @inline
    def fill(self):
        """Look the positions up in the page table."""
        a, indptr, positions = T.meta_var((self.a, self.indptr, self.positions))
        is_large = T.meta_var(self.num_rows * self.width > SERIAL_POSITIONS)
        num_tasks = T.if_then_else(is_large, T.min(num_threads(), self.num_rows), 1)
        indptr[0] = 0
        for task in T.parallel(num_tasks, annotations=TASKS):
            row = ListedRow(self.spec, a)
            row.begin()
            for r in range(self._first_row(task, num_tasks), self._first_row(task + 1, num_tasks)):
                row.find(r)
                count = T.int32(0)
                for i in range(self.width):
                    if row.sees(positions[r, i]):
                        count += 1
                indptr[r + 1] = count
        for r in range(self.num_rows):
            indptr[r + 1] = indptr[r + 1] + indptr[r]
        for task in T.parallel(num_tasks, annotations=TASKS):
            row = ListedRow(self.spec, a)
            row.begin()
            for r in range(self._first_row(task, num_tasks), self._first_row(task + 1, num_tasks)):
                row.find(r)
                at = indptr[r]
                for i in range(self.width):
                    position = T.meta_var(positions[r, i])
                    if row.sees(position):
                        self.values[at] = row.slot(position)
                        at += 1

    def _first_row(self, task, num_tasks):
        return cut(self.num_rows, task, num_tasks)


@T.meta_class
class ListedRow:
    """A row of Q whose positions are looked up, one row after another.

    Parameters
    ----------
    spec : KernelSpec
    a : PagedInputs
        With `sequences`.
    """

    def __init__(self, spec: KernelSpec, a):
        self.a, self.page_size = a, spec.page_size
        self.sequence, self.own = T.local_scalar("int32"), T.local_scalar("int32")
        self.first_page = T.local_scalar("int32")

    @inline
    def begin(self):
        """Begin before the first row."""
        self.sequence = 0

    @inline
    def find(self, row):
        """Find the sequence of a row; rows come in ascending order."""
        a = T.meta_var(self.a)
        while a.query_indptr[self.sequence + 1] <= row:
            self.sequence += 1
        self.first_page = a.page_indptr[self.sequence]
        num_pages = a.page_indptr[self.sequence + 1] - self.first_page
        num_after = a.query_indptr[self.sequence + 1] - row
        self.own = a.sequences.kv_len(self.sequence, num_pages) - num_after

    def sees(self, position):
        """Whether a listed position is none of those that are left out."""
        return T.And(position >= 0, position <= self.own)

    def slot(self, position):
        """The slot of a position."""
        page = self.a.page_ids[self.first_page + position // self.page_size]
        return page * self.page_size + position % self.page_size
