# SPDX-License-Identifier: Apache-2.0
"""Attention of one query row per sequence over its pages: split-KV decode.

The work is bound by reading K and V once, so it is split by pages: tasks take splits of the pages
of the batch from a queue. The pages of a sequence are cut into segments at places of its own. A
sequence whose segments are in one split is finished there; the others leave partial states, which
are merged in the same call, in the order of positions.
"""

from dataclasses import replace

from tvm.script import tirx as T

from ...define import attributes
from ...layout import arrays_of, view_pages
from ...script import inline, prim_func
from ...semantics.visibility import CausalMask, WindowMask, sequences_of
from ...signatures.attention import DECODE, DECODE_SLIDING, DECODE_WINDOWED
from ...signatures.inputs import PagedInputs
from ...signatures.signature import Signature
from ...spec import LOG2E, KernelSpec
from ..isa.simd import F32, import_llvm, index_temp, require_half_conversion
from ..pages.kv_rows import PagedRows
from ..rotation import rotation_of
from ..rows.kv_blocks import BLOCK, KvBlocks, VisibleSpans
from ..rows.local_rows import (
    Blocking,
    QueryLoader,
    RowSoftmax,
    ScoreMask,
    max_local_heads,
    max_local_rows,
)
from ..rows.page_schedule import PageSchedule, Pairs, Slots
from ..rows.products import helpers_of, products_of, single_row_operands
from ..softmax.output import Output, PartialStates, finish
from ..tasks import TASKS, Queue, cut


@inline
def attend(spec: KernelSpec, a: PagedInputs, ops, kind: type = PagedRows, tables_per_row=None):
    """Attend with one row of Q per sequence, and store.

    Parameters
    ----------
    spec : KernelSpec
    a : PagedInputs
        With views of the pages, `sequences`, `mask` and `rope`. With `ListedRows`, rows of Q are
        its sequences, and its pages positions.
    ops : operands object
        As `products.single_row_operands` chooses it.
    kind : type
        Where K and V are: `PagedRows` or `ListedRows`.
    tables_per_row : int32 expression, optional
        Page tables of a row of Q, each of which is a sequence; see `PageSchedule`.
    """
    batch_size, group = T.meta_var((a.batch_size, spec.group_size))
    page_size = T.meta_var(spec.page_size if kind is PagedRows else 1)
    schedule = PageSchedule(
        replace(spec, page_size=page_size), a.page_indptr, batch_size, tables_per_row
    )
    schedule.begin()
    slots = Slots(schedule)
    slots.begin()
    states = PartialStates(spec, slots.num_slots, max_local_heads(spec) * group)
    output = Output(spec, a, begin_with_sinks=True)
    queue = Queue()
    queue.begin()
    ops.begin([a.q, *arrays_of(a.pages)])
    helpers = T.meta_var(helpers_of(spec, is_listed=kind is not PagedRows))
    import_llvm(Queue.llvm_helper, *ops.llvm_helpers, *helpers)

    for _ in T.parallel(schedule.num_tasks, annotations=TASKS):
        row, pair = RowAttention(spec, ops, a, states, output, kind), Pairs(schedule)
        a.rope.begin_task()
        row.begin()
        pair.begin()
        split_id = T.cast(queue.take(), "int32")
        while split_id < schedule.num_splits:
            pair.begin_split(split_id)
            while pair.has_next():
                pair.take()
                if pair.num_segments > 0:
                    row.attend(pair, page_size, slots.first(split_id))
            split_id = T.cast(queue.take(), "int32")

    merge_tasks = slots.num_merge_tasks(max_local_heads(spec) * group)
    for task in T.parallel(merge_tasks, annotations=TASKS):
        pair = Pairs(schedule)
        pair.begin()
        for split_id in range(schedule.num_splits - 1):
            pair.find_cut(split_id)
            if pair.num_splits > 0:
                token, num_rows = T.meta_var((pair.row, pair.num_heads * group))
                for i in range(
                    cut(num_rows, task, merge_tasks), cut(num_rows, task + 1, merge_tasks)
                ):
                    at = T.meta_var(states.at(slots.first(split_id), i))
                    for other in range(split_id + 1, split_id + pair.num_splits):
                        for slot in range(slots.first(other) + 1, slots.first(other + 1)):
                            states.add(at, *states.result(states.at(slot, i)))
                    head = T.meta_var(pair.first_head * group + i)
                    finish(a.rope, output, token, head, *states.result(at))
    states.free()
    slots.free()
    for sequence in range(batch_size):
        if a.page_indptr[sequence + 1] == a.page_indptr[sequence]:  # it is in no split
            first = T.meta_var(schedule.first_head_of(sequence) * group)
            for head in range(schedule.heads * group):
                output.clear(schedule.row_of(sequence), first + head)


@T.meta_class
class RowAttention:
    """Attention of one query row of a sequence with some KV heads, its local heads: of a pair.

    The state of each segment is computed by itself. Those from the first one on are merged in a
    slot of `states`; segments with which a task goes on in the middle get a slot each.

    Parameters
    ----------
    spec : KernelSpec
    ops : operands object
        As `products.single_row_operands` chooses it.
    a : the kernel's arguments, with `sequences`, `mask` and `rope`.
    states : PartialStates
    output : Output
        Whose rows begin with their sinks.
    kind : type
        Where K and V are: `PagedRows` or `ListedRows`.

    Attributes
    ----------
    q : elements of `ops` ``[row of all local heads, element]``
    o : float32 ``[row of all local heads, v_head_dim]``
        Sums of V, times weights.
    scores : float32 ``[row of a local head, BLOCK]``
        Logits times log2(e).
    weights : elements of `ops`, as `scores`
    """

    def __init__(self, spec, ops, a, states, output, kind: type = PagedRows):
        self.spec, self.a, self.states, self.output = spec, a, states, output
        self.row_sets = Blocking.of(spec).row_sets
        padded_rows, num_rows = Blocking.of(spec).padded_rows, max_local_rows(spec)
        self.factor = T.local_scalar(F32)  # of the scores
        self.q = T.alloc_buffer((num_rows, spec.qk_head_dim // ops.values_per_element), ops.dtype)
        self.o = T.alloc_buffer((num_rows, spec.v_head_dim), F32)
        self.scores = T.alloc_buffer((padded_rows, BLOCK), F32)
        self.weights = self.scores  # in whose place they come
        if ops.values_per_element > 1:
            self.weights = T.alloc_buffer((padded_rows, BLOCK // ops.values_per_element), ops.dtype)
        self.softmax, self.mask = RowSoftmax(spec, ops), ScoreMask(spec)
        self.loader = QueryLoader(spec, ops, a.rope, self.factor)
        is_listed = kind is not PagedRows
        self.qk, self.pv = products_of(spec, ops, a.rope, self.factor, is_listed=is_listed)
        self.spans, self.kv = VisibleSpans(a), KvBlocks(spec, a, kind)

    @inline
    def begin(self):
        """Begin a task."""
        self.factor = self.a.sm_scale * T.float32(LOG2E)

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
        a, spec, o, softmax = T.meta_var((self.a, self.spec, self.o, self.softmax))
        states, group, spans = T.meta_var((self.states, spec.group_size, self.spans))
        sequence, token = T.meta_var((pair.sequence, pair.row))
        position = T.meta_var(a.q_position(token))
        kv_len = T.meta_var(a.sequences.kv_len(sequence, pair.num_pages))
        spans.begin_sequence(sequence, kv_len, position)
        a.rope.begin_sequence(spans.length)
        self.kv.begin_pair(sequence, pair.first_head, pair.num_heads)
        for head in range(pair.num_heads):
            self.loader.load(a.q, token, pair.first_head + head, self.q, head, position)
            self.mask.begin_head(pair.first_head + head, head, position)
            self.qk.begin_head(self.q, head)
        for i in range(pair.num_segments):
            first_page = pair.first_page + i * pair.segment
            last_page = T.min(first_page + pair.segment, pair.last_page)
            begin, end = T.meta_var((first_page * page_size, last_page * page_size))
            self.attend_to_segment(pair, first_page, begin, end, pair.last_page * page_size)
            if pair.num_pages > pair.segment:
                for row in range(pair.num_heads * group):
                    if first_page == 0:
                        states.put(states.at(slot, row), *softmax.result(o, row))
                    elif pair.first_page > 0:
                        states.put(states.at(slot + 1 + i, row), *softmax.result(o, row))
                    else:
                        states.add(states.at(slot, row), *softmax.result(o, row))
        if pair.is_whole:
            for row in range(pair.num_heads * group):
                head = T.meta_var(pair.first_head * group + row)
                if pair.num_pages > pair.segment:
                    finish(a.rope, self.output, token, head, *states.result(states.at(slot, row)))
                else:
                    finish(a.rope, self.output, token, head, *softmax.result(o, row))

    @inline
    def attend_to_segment(self, pair, first_page, begin, end, last):
        """Let the rows of a pair see the positions ``begin .. end - 1`` alone."""
        q, scores, weights, o = T.meta_var((self.q, self.scores, self.weights, self.o))
        qk, mask, softmax, pv = T.meta_var((self.qk, self.mask, self.softmax, self.pv))
        sink_logits, spans, kv = T.meta_var((self.a.sink_logits, self.spans, self.kv))
        for head in range(pair.num_heads):
            softmax.clear(o, head)
            if sink_logits is not None:
                if first_page == 0:
                    softmax.begin_with_sinks(sink_logits, pair.first_head + head, head)
        for span in range(spans.count):
            spans.take(span)
            kv.begin_span(spans, begin, end, last)
            for block in range(kv.num_blocks):
                kv.begin_block(block)
                qk.begin_block(kv, spans.k_offset)
                for head in range(pair.num_heads):
                    kv.begin_head(head)
                    qk.multiply(q, kv, scores)  # S = Q K^T
                    mask.apply(scores, kv, spans.k_offset)
                    pv.load_v(kv)
                    for row_set in range(self.row_sets):
                        softmax.update(scores, weights, head, row_set)  # P = exp2(S - maximum)
                        pv.multiply(weights, kv, o, softmax.rescale, row_set)  # O += P V
        pv.finish(o, pair.num_heads)


def decode(spec: KernelSpec, signature: Signature = DECODE):
    """Build `decode`, or another kernel of its kind that `signature` belongs to.

    With `window` a row sees the last `window` positions of its pages, or those of its chunk of
    ``-window`` positions. They may begin anywhere in the sequence: columns are counted from the
    first slot of the table, which is position ``first_positions[b]``. The cost scales with
    the window, but work is balanced among threads only if the page table has few pages before it.

    Returns
    -------
    tvm.tirx.PrimFunc
        Private, free to be named by its module.

    Raises
    ------
    ValueError
        For float16 on a target that cannot convert it.
    """
    require_half_conversion(spec, spec.dtype, spec.kv_dtype)
    ops = single_row_operands(spec)

    @prim_func(arguments=signature.of(spec))
    def decode(matched: PagedInputs):
        T.func_attr(attributes(spec))
        mask = T.meta_var(
            CausalMask(1) if matched.window is None else WindowMask(1, matched.window)
        )
        sequences = T.meta_var(sequences_of(spec, matched, index_temp))
        a = T.meta_var(
            replace(matched, pages=view_pages(matched.pages, spec), sequences=sequences, mask=mask)
        )
        attend(spec, replace(a, rope=rotation_of(spec, a)), ops)

    return decode


def decode_windowed(spec: KernelSpec):
    """Build `decode` with ``lengths [3, B]``, as the stock cache passes it for windows."""
    return decode(spec, DECODE_WINDOWED)


def decode_sliding(spec: KernelSpec):
    """Build `decode` of layers with a window, which is one more argument."""
    return decode(spec, DECODE_SLIDING)
