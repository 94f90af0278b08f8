# SPDX-License-Identifier: Apache-2.0
"""Attention of one query row of a sequence to segments of its pages, with some KV heads."""

from tvm.script import tirx as T

from ...script import inline
from ...spec import KernelSpec
from ..pages.kv_rows import PagedRows
from ..softmax.output import Output
from ..softmax.partial_states import PartialStates
from .kv_blocks import KvBlocks, VisibleSpans
from .query_rows import QueryRows
from .single_row_products import products_of


@T.meta_class
class RowSegments:
    """The loop of decode over positions, for one pair of a sequence and some KV heads.

    The state of each segment is computed by itself. Those from the first one on are merged in a
    slot of `states`; segments with which a task goes on in the middle get a slot each.

    Parameters
    ----------
    spec : KernelSpec
    ops : operands object
        As `kv_operands.single_row_operands` chooses it.
    a : the kernel's arguments, with `sequences`, `mask` and `rope`.
    states : PartialStates
    output : Output
        Whose rows begin with their sinks.
    kind : type
        Where K and V are: `PagedRows` or `ListedRows`.
    """

    def __init__(
        self,
        spec: KernelSpec,
        ops,
        a,
        states: PartialStates,
        output: Output,
        kind: type = PagedRows,
    ):
        self.spec, self.a, self.states, self.output = spec, a, states, output
        self.rows = QueryRows(spec, ops, a.rope, a.sm_scale)
        self.products = products_of(spec, ops, self.rows, kind is not PagedRows)
        self.spans, self.kv = VisibleSpans(a), KvBlocks(spec, a, kind)

    @inline
    def begin(self):
        """Begin a task."""
        self.a.rope.begin_task()
        self.rows.begin()

    @inline
    def attend(self, pair, page_size, slot):
        """Attend with the row of a pair to its segments, and store its result if it has them all.

        Parameters
        ----------
        pair : Pairs, or what has its attributes
        page_size : int
        slot : int32 expression
            Takes the state of the segments from the first one on; the following ones take others.
        """
        a, spec, rows, kv, spans = T.meta_var((self.a, self.spec, self.rows, self.kv, self.spans))
        states, group = T.meta_var((self.states, spec.group_size))
        sequence, token = T.meta_var((pair.sequence, pair.row))
        position = T.meta_var(a.q_position(token))
        kv_len = T.meta_var(a.sequences.kv_len(sequence, pair.num_pages))
        spans.begin_sequence(sequence, kv_len, position)
        a.rope.begin_sequence(spans.length)
        kv.begin_pair(sequence, pair.first_head, pair.num_heads)
        for head in range(pair.num_heads):
            rows.load_q(a.q, token, pair.first_head + head, head, position)
            self.products.begin_head(head)
        for i in range(pair.num_segments):
            first_page = pair.first_page + i * pair.segment
            last_page = T.min(first_page + pair.segment, pair.last_page)
            pages = T.meta_var((first_page, last_page, pair.last_page))
            self._attend_to_segment(pair, first_page, *(page * page_size for page in pages))
            if pair.num_pages > pair.segment:
                for row in range(pair.num_heads * group):
                    if first_page == 0:
                        states.put(states.at(slot, row), *rows.result(row))
                    elif pair.first_page > 0:
                        states.put(states.at(slot + 1 + i, row), *rows.result(row))
                    else:
                        states.add(states.at(slot, row), *rows.result(row))
        if pair.is_whole:
            for row in range(pair.num_heads * group):
                head = T.meta_var(pair.first_head * group + row)
                if pair.num_pages > pair.segment:
                    finish(a.rope, self.output, token, head, *states.result(states.at(slot, row)))
                else:
                    finish(a.rope, self.output, token, head, *rows.result(row))

    @inline
    def _attend_to_segment(self, pair, first_page, begin, end, last):
        """Let the rows of a pair see the positions ``begin .. end - 1`` alone."""
        a, rows, kv, spans = T.meta_var((self.a, self.rows, self.kv, self.spans))
        products = T.meta_var(self.products)
        for head in range(pair.num_heads):
            rows.clear(head)
            if a.sink_logits is not None:
                if first_page == 0:
                    rows.begin_with_sinks(a.sink_logits, pair.first_head + head, head)
        for span in range(spans.count):
            spans.take(span)
            kv.begin_span(spans, begin, end, last)
            for block in range(kv.num_blocks):
                kv.begin_block(block)
                products.begin_block(kv, spans.k_offset)
                for head in range(pair.num_heads):
                    kv.begin_head(head)
                    products.multiply_q_k(kv)
                    rows.mask(kv, spans.k_offset)
                    products.take_v(kv)
                    for row_block in range(rows.blocking.row_blocks):
                        rows.update_softmax(head, row_block)
                        products.add_weighted_v(kv, row_block)
        products.finish(pair.num_heads)


@inline
def finish(rope, output, token, head, sums, row, row_max, row_sum):
    """Store a row that has seen everything; sums of V are multiplied back, if V was."""
    rope.restore(sums, row)
    output.finish(token, head, sums, row, row_max, row_sum)
