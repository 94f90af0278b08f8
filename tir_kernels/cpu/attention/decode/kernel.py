# SPDX-License-Identifier: Apache-2.0
"""Attention of one query row per sequence over its pages: split-KV decode.

The work is bound by reading K and V once, so it is split by pages: tasks take splits of the pages
of the batch from a queue. A sequence whose pages are in one split is finished there; the others
leave partial states, which are merged in the same call. `signatures.decode` has the arguments.
"""

from __future__ import annotations

from dataclasses import replace

from tvm.script import tirx as T

from ....semantics.visibility import CausalMask
from ....signatures import decode as signatures
from ....signatures.inputs import Lengths, PagedInputs
from ....spec import KernelSpec
from ...components.output import Output
from ...components.partial_states import PartialStates
from ...components.work import Queue, for_tasks
from ...simd import Register, index_temp
from ..define import build
from ..kv_operands import operands, single_row_operands
from ..rotation import rotation_of
from .blocking import Blocking
from .code_split import scope_of, split_of
from .page_schedule import PageSchedule
from .single_row import Pages, SingleRow, attend_row, bind_lengths


def emit_decode(spec: KernelSpec, a: PagedInputs) -> None:
    """Emit the body for inputs with a `mask`."""
    a = bind_lengths(spec, a)
    a = replace(a, rope=rotation_of(spec, a))
    max_local_heads = Blocking.of(spec).max_local_heads(spec)
    schedule, queue = PageSchedule(spec, a, max_local_heads), Queue()
    queue.begin()
    states = PartialStates(spec, schedule.num_splits, max_local_heads * spec.group_size)
    output = Output(spec, a.o, a.lse)
    ops = single_row_operands(spec, operands(spec, spec.kv_dtype), a.lengths.slot_of is not None)
    ops.begin([a.q, a.pages])

    def task_body(task):
        split = split_of(spec, ops, a.sm_scale, max_local_heads)
        a.rope.begin_task()
        sequence = Register(1, "int32", T.int32(0))

        def attend_split(_, split_id):
            def attend_pair(row: SingleRow, pages: Pages):
                attend_row(spec, a, split, row, pages)
                num_rows = index_temp(row.num_heads * spec.group_size)
                first_head = row.first_head * spec.group_size
                with T.If(pages.is_whole):
                    with T.Then(), T.serial(num_rows) as i:
                        at = row.sequence, first_head + i
                        output.finish(*at, split.o, *split.query_row(i))
                    with T.Else(), T.serial(num_rows) as i:
                        states.put(split_id, pages.first > 0, i, split.o, *split.query_row(i))

            schedule.for_pairs(split_id, sequence, attend_pair)

        queue.for_items(1, lambda _: schedule.num_splits, attend_split)

    def merge(row: SingleRow, first_split, num_splits):
        with T.serial(0, row.num_heads * spec.group_size) as i:
            head = row.first_head * spec.group_size + i
            states.merge(first_split, num_splits, i, output, row.sequence, head)

    with ops.scope(), Queue.scope(), scope_of(spec):
        for_tasks(schedule.num_tasks, task_body)
    schedule.for_cut_pairs(merge)
    states.free()
    _clear_empty(spec, a, output)


def _clear_empty(spec: KernelSpec, a: PagedInputs, output: Output) -> None:
    """Store the result of sequences without pages, which are in no split."""
    with T.serial(a.batch_size) as b:
        with T.If(a.page_indptr[b + 1] == a.page_indptr[b]), T.Then():
            with T.serial(spec.num_kv_heads) as head, T.serial(spec.group_size) as i:
                output.clear(b, head * spec.group_size + i)


def decode(spec: KernelSpec, lengths: Lengths = Lengths.WINDOWS):
    """Build the kernel `decode`; its arguments are those of `signatures.decode.decode`."""

    def attend(a: PagedInputs) -> None:
        emit_decode(spec, replace(a, mask=CausalMask(1)))

    return build(spec, signatures.decode, attend, lengths=lengths)


def decode_windowed(spec: KernelSpec):
    """Build `decode` with ``length_info [3, B]``, as the stock cache passes it for windows."""
    return decode(spec, Lengths.MATRIX)
