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
from ...spec import KernelSpec
from ..isa.conversion import require_half_conversion
from ..isa.simd import import_llvm, index_temp
from ..pages.kv_rows import PagedRows
from ..rotation.rotation import rotation_of
from ..rows.page_schedule import PageSchedule, Pairs, Slots
from ..rows.query_rows import max_local_heads
from ..rows.row_segments import RowSegments, finish
from ..rows.single_row_products import helpers_of
from ..softmax.output import Output
from ..softmax.partial_states import PartialStates
from ..tiles.kv_operands import single_row_operands
from ..work import TASKS, Queue, cut


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
        As `kv_operands.single_row_operands` chooses it.
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
    helpers = T.meta_var(helpers_of(spec, kind is not PagedRows))
    import_llvm(Queue.llvm_helper, *ops.llvm_helpers, *helpers)

    for _ in T.parallel(schedule.num_tasks, annotations=TASKS):
        segments, pair = RowSegments(spec, ops, a, states, output, kind), Pairs(schedule)
        segments.begin()
        pair.begin()
        split_id = T.cast(queue.take(), "int32")
        while split_id < schedule.num_splits:
            pair.begin_split(split_id)
            while pair.has_next():
                pair.take()
                if pair.num_segments > 0:
                    segments.attend(pair, page_size, slots.first(split_id))
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
