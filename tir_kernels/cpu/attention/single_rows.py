# SPDX-License-Identifier: Apache-2.0
"""Sequences that have one row, among others with more: they attend as in decode."""

from tvm.script import tirx as T

from ...script import inline
from ...spec import KernelSpec
from ..components.kv_blocks import KvBlocks, VisibleSpans
from ..components.output import Output
from ..components.query_rows import QueryRows, max_local_heads
from ..components.single_row_products import products_of
from ..components.work import cut
from ..simd import index_temp

SEQUENCES_PER_TASK = 8  # fewer would leave tasks of too different a size


class Singles:
    """The sequences of a batch that have one row.

    Parameters
    ----------
    spec : KernelSpec
    ops : operands object
        As `kv_operands.single_row_operands` chooses it.
    a : the kernel's arguments, with `lengths`.
    """

    def __init__(self, spec: KernelSpec, ops, a):
        self.spec, self.a = spec, a
        self.output = Output(spec, a, begin_with_sinks=True)
        self.ops = ops

    def has(self, sequence):
        """Whether it has one row, which sees all that is held."""
        a = self.a
        row, gap = index_temp(a.q_indptr[sequence]), a.lengths.gap(sequence)
        is_single = a.q_indptr[sequence + 1] - row == 1
        if not a.lengths.has_gaps:
            return is_single
        num_pages = index_temp(a.page_indptr[sequence + 1] - a.page_indptr[sequence])
        own = a.mask.own(0, 1, a.lengths.kv_len(sequence, num_pages))
        is_recent = a.q_rope_position[row] <= gap.sinks + gap.back
        return T.And(is_single, T.And(own - gap.back <= gap.begin, is_recent))

    def begin_task(self) -> None:
        """Make the buffers of a task."""
        self.rows = QueryRows(self.spec, self.ops, self.a.rope, self.a.sm_scale)
        self.products = products_of(self.spec, self.ops, self.rows)
        self.spans, self.kv = VisibleSpans(self.a), KvBlocks(self.spec, self.a)
        self.rows.begin()

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
        a, spec, rows, kv = T.meta_var((self.a, self.spec, self.rows, self.kv))
        products, spans, group = T.meta_var((self.products, self.spans, spec.group_size))
        first_head = cut(spec.num_kv_heads, head_split, num_head_splits)
        num_heads = cut(spec.num_kv_heads, head_split + 1, num_head_splits) - first_head
        token = a.q_indptr[sequence]
        num_pages = a.page_indptr[sequence + 1] - a.page_indptr[sequence]

        position = T.meta_var(a.q_rope_position[token])
        spans.begin_sequence(sequence, a.lengths.kv_len(sequence, num_pages), position)
        a.rope.begin_sequence(spans.length)
        kv.begin_pair(sequence, first_head, num_heads)
        for head in range(num_heads):
            rows.load_q(a.q, token, first_head + head, head, position)
            products.begin_head(head)
            if a.sink_logits is not None:
                rows.begin_with_sinks(a.sink_logits, first_head + head, head)
        for span in range(spans.count):
            spans.take(span)
            kv.begin_span(spans, 0, spans.kv_len)
            for block in range(kv.num_blocks):
                kv.begin_block(block)
                products.begin_block(kv, spans.k_offset)
                for head in range(num_heads):
                    kv.begin_head(head)
                    products.multiply_q_k(kv)
                    rows.mask(kv, spans.k_offset)
                    products.take_v(kv)
                    for row_block in range(rows.blocking.row_blocks):
                        rows.update_softmax(head, row_block)
                        products.add_weighted_v(kv, row_block)
        products.finish(num_heads)
        rows.finish(num_heads)
        for i in range(num_heads * group):
            self.output.finish(token, first_head * group + i, *rows.result(i))
