# SPDX-License-Identifier: Apache-2.0
"""Lists of blocks of positions, as page tables: a block is a few pages of a sequence."""

from tvm.script import tirx as T

from ...script import inline
from ...semantics.visibility import WholeSequence
from ...spec import KernelSpec
from ..isa.simd import index_temp
from ..tasks import TASKS, Workspace, cut, num_threads
from .slot_lists import SERIAL_POSITIONS, ListedRow


@T.meta_class
class BlockPages:
    """The pages of the blocks that lists name: CSR, a page table for each list.

    Blocks that a row does not see, and negative ones, are left out. The pages of the row's own
    block come last, up to the one with the row: only the last page of a table is not full.

    Parameters
    ----------
    spec : KernelSpec
    a : PagedInputs
        With `sequences`.
    blocks : int32 Buffer ``[num_rows, lists_per_row, width]``
    block_size : int32
        A multiple of the page size.
    shape : tuple of int32 expressions
        The shape of `blocks`.

    Attributes
    ----------
    count : int32 expression
        Number of lists.
    indptr : int32 Buffer ``[count + 1]``
    values : int32 Buffer ``[indptr[count]]``
        The page ids.
    sequences : WholeSequence
        Lengths of the lists.
    """

    def __init__(self, spec: KernelSpec, a, blocks, block_size, shape):
        self.spec, self.a, self.blocks, self.block_size = spec, a, blocks, block_size
        self.num_rows, self.lists_per_row, self.width = shape
        self.count = index_temp(self.num_rows * self.lists_per_row)
        self.pages_of_block = index_temp(block_size // spec.page_size)
        # The pages of all lists may exceed 32 bits only together with the memory of the machine.
        self.size = index_temp(self.count * self.width * self.pages_of_block)
        self._indptr = Workspace(self.count + 1, (), "int32", "lists of blocks")
        self._last = Workspace(self.count, (), "int32", "lists of blocks")
        self._pages = Workspace(self.size, (), "int32", "lists of blocks")
        self.indptr, self.last_page_len = self._indptr.buffer, self._last.buffer
        self.values = self._pages.buffer
        self.sequences = WholeSequence(spec, self.last_page_len, index_temp)

    @inline
    def free(self):
        """Give the memory back."""
        self._pages.free()
        self._last.free()
        self._indptr.free()

    @inline
    def fill(self):
        """Look the blocks up in the page table."""
        num_tasks = T.if_then_else(
            self.size > SERIAL_POSITIONS, T.min(num_threads(), self.num_rows), 1
        )
        self.indptr[0] = 0
        for task in T.parallel(num_tasks, annotations=TASKS):
            row = BlockRow(self.spec, self.a, self.block_size)
            row.begin()
            for r in range(
                cut(self.num_rows, task, num_tasks), cut(self.num_rows, task + 1, num_tasks)
            ):
                row.find_blocks(r)
                for i in range(self.lists_per_row):
                    self._count(row, r, i)
        for i in range(self.count):
            self.indptr[i + 1] = self.indptr[i + 1] + self.indptr[i]
        for task in T.parallel(num_tasks, annotations=TASKS):
            row = BlockRow(self.spec, self.a, self.block_size)
            row.begin()
            for r in range(
                cut(self.num_rows, task, num_tasks), cut(self.num_rows, task + 1, num_tasks)
            ):
                row.find_blocks(r)
                for i in range(self.lists_per_row):
                    self._put(row, r, i)

    @inline
    def _count(self, row, r, i):
        """Store the number of pages of a list, and the slots in use of the last one."""
        num_before, has_own = T.int32(0), T.int32(0)
        for j in range(self.width):
            block = self.blocks[r, i, j]
            if T.And(block >= 0, block < row.own_block):
                num_before += 1
            if T.And(block >= 0, block == row.own_block):
                has_own = 1
        index = r * self.lists_per_row + i
        num_pages = num_before * self.pages_of_block
        self.indptr[index + 1] = num_pages + has_own * row.num_own_pages
        page_size = T.meta_var(self.spec.page_size)
        self.last_page_len[index] = T.if_then_else(has_own != 0, row.own % page_size + 1, page_size)

    @inline
    def _put(self, row, r, i):
        """Store the pages of a list."""
        index = r * self.lists_per_row + i
        at = self.indptr[index]
        for j in range(self.width):
            block = self.blocks[r, i, j]
            if T.And(block >= 0, block < row.own_block):
                for page in range(self.pages_of_block):
                    self.values[at + page] = row.page(block * self.pages_of_block + page)
                at += self.pages_of_block
        for page in range(self.indptr[index + 1] - at):
            self.values[at + page] = row.page(row.own_block * self.pages_of_block + page)


@T.meta_class
class BlockRow(ListedRow):
    """A row of Q whose blocks are looked up, one row after another.

    Attributes
    ----------
    own_block, num_own_pages : int32
        The block that the row is in, and the pages of it that the row sees.
    """

    def __init__(self, spec: KernelSpec, a, block_size):
        super().__init__(spec, a)
        self.block_size = block_size
        self.own_block, self.num_own_pages = T.local_scalar("int32"), T.local_scalar("int32")

    @inline
    def find_blocks(self, row):
        """Find the sequence and the block of a row; rows come in ascending order."""
        self.find(row)
        self.own_block = self.own // self.block_size
        self.num_own_pages = self.own % self.block_size // self.page_size + 1

    def page(self, index):
        """The id of a page of the sequence."""
        return self.a.page_ids[self.first_page + index]
