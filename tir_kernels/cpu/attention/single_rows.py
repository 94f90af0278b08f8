# SPDX-License-Identifier: Apache-2.0
"""Sequences that have one row, among others with more: they attend as in decode."""

from dataclasses import replace

from tvm.script import tirx as T

from ...script import inline
from ...semantics.visibility import CausalMask, WindowMask
from ...spec import KernelSpec
from ..isa.simd import index_temp
from ..rows.local_rows import max_local_heads
from ..rows.page_schedule import segment_of
from ..softmax.output import Output, PartialStates
from ..tasks import cut
from .decode import RowAttention

SEQUENCES_PER_TASK = 8  # fewer would leave tasks of too different a size


def mask_of_single(a):
    """Return the mask of a row that is the only node of its tree."""
    return CausalMask(1) if a.window is None else WindowMask(1, a.window)


class Singles:
    """The sequences of a batch that have one row.

    Parameters
    ----------
    spec : KernelSpec
    ops : operands object
        As `products.single_row_operands` chooses it.
    a : the kernel's arguments, with `sequences`.
    num_tasks : int32 expression
    """

    def __init__(self, spec: KernelSpec, ops, a, num_tasks):
        self.spec, self.a = spec, a if a.tree is None else replace(a, mask=mask_of_single(a))
        self.output = Output(spec, a, begin_with_sinks=True)
        self.states = PartialStates(spec, num_tasks, max_local_heads(spec) * spec.group_size)
        self.ops = ops

    def has(self, sequence):
        """Whether it has one row, which sees all that is held."""
        a = self.a
        row, gap = index_temp(a.query_indptr[sequence]), a.sequences.gap(sequence)
        is_single = a.query_indptr[sequence + 1] - row == 1
        if a.tree is not None:  # no tree, or a root alone that is not hidden from itself
            root = index_temp(a.tree_order_indptr[sequence])
            num_nodes = index_temp(a.tree_order_indptr[sequence + 1] - root)
            is_root = T.if_then_else(
                num_nodes == 1, a.tree_order[root, 0] < a.tree_order[root, 1], num_nodes == 0
            )
            is_single = T.And(is_single, is_root)
        if not a.sequences.has_gaps:
            return is_single
        num_pages = index_temp(a.page_indptr[sequence + 1] - a.page_indptr[sequence])
        own = a.mask.own(0, 1, a.sequences.kv_len(sequence, num_pages))
        is_recent = a.query_positions[row] <= gap.sinks + gap.back
        return T.And(is_single, T.And(own - gap.back <= gap.begin, is_recent))

    def begin_task(self, task) -> None:
        """Make the buffers of a task."""
        self.task = task
        self.row = RowAttention(self.spec, self.ops, self.a, self.states, self.output)
        self.pair = WholePair(self.spec, self.a)
        self.row.begin()

    @inline
    def attend(self, queue, num_tasks):
        """Attend and store, for the items that a task takes: a sequence with some KV heads."""
        heads = T.meta_var(self.spec.num_kv_heads)
        fewest = T.meta_var(-(-heads // max_local_heads(self.spec)))
        is_enough = T.meta_var(self.a.batch_size >= num_tasks * SEQUENCES_PER_TASK)
        num_head_splits = T.if_then_else(is_enough, fewest, heads)
        item = queue.take()
        first_item = T.int64(0)  # of the sequence
        for sequence in range(self.a.batch_size):
            num_items = T.meta_var(T.if_then_else(self.has(sequence), num_head_splits, 0))
            end_item = first_item + T.cast(num_items, "int64")
            while item < end_item:
                head_split = T.cast(item - first_item, "int32")
                self._attend_heads(sequence, head_split, num_head_splits)
                item = queue.take()
            first_item = end_item

    @inline
    def _attend_heads(self, sequence, head_split, num_head_splits):
        """Attend with some KV heads of a sequence, and store."""
        heads, pair = T.meta_var((self.spec.num_kv_heads, self.pair))
        first_head = cut(heads, head_split, num_head_splits)
        num_heads = cut(heads, head_split + 1, num_head_splits) - first_head
        pair.begin(sequence, first_head, num_heads)
        self.row.attend(pair, self.spec.page_size, self.task)


@T.meta_class
class WholePair:
    """As `page_schedule.Pairs`: a sequence with some KV heads, whose pages one task reads."""

    is_whole, first_page = True, 0

    def __init__(self, spec: KernelSpec, a):
        self.spec, self.a = spec, a
        self.sequence, self.row, self.num_pages = (T.local_scalar("int32") for _ in range(3))
        self.first_head, self.num_heads = (T.local_scalar("int32") for _ in range(2))
        self.segment = T.local_scalar("int32")

    @inline
    def begin(self, sequence, first_head, num_heads):
        """Load a pair: a sequence and some of its heads."""
        self.sequence = sequence
        self.row = self.a.query_indptr[sequence]
        self.first_head = first_head
        self.num_heads = num_heads
        self.num_pages = self.a.page_indptr[sequence + 1] - self.a.page_indptr[sequence]
        self.segment = segment_of(self.spec, self.num_pages)

    @property
    def last_page(self):
        """Return the number of pages of the sequence."""
        return self.num_pages

    @property
    def num_segments(self):
        """Return the number of segments: one at least, so that a row is stored."""
        return T.max((self.num_pages + self.segment - 1) // self.segment, 1)
