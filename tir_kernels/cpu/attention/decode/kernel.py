# SPDX-License-Identifier: Apache-2.0
"""Attention of one query row per sequence over its pages.

The work is bound by reading K and V once, so it is cut by pages: the units of the batch are the
pages of every sequence, flattened through the page table's indptr, and tasks take pieces of them
from a queue. A sequence that falls into one piece is finished there; one that is cut leaves partial
states, which are merged in the same call. Where the pages are too few for that, or the heads too
many to be kept at once, the KV heads come in parts, and the units are the pages of every (sequence,
part).
"""

from __future__ import annotations

from dataclasses import replace

from tvm.script import tirx as T

from ....semantics.visibility import CausalMask
from ....signatures import decode as signatures
from ....signatures.inputs import Lengths, PagedInputs
from ....spec import KernelSpec
from ...simd import Register, index_temp, wide_temp
from ...tasks import Pieces, Queue, for_tasks, num_threads
from ..define import build
from ..inline_rope import InlineRope
from ..kv_operands import operands, single_row_operands
from ..partial_states import Output, PartialStates
from .blocking import Blocking
from .single_row import Pages, SingleRow, attend_row, bind_lengths, heads_of
from .split import DecodeSplit

SERIAL_ELEMENTS = 1 << 15  # elements of K below which a launch costs more than it saves
MIN_ELEMENTS = 1 << 16  # of K that are worth a cut
UNITS_PER_TASK = 16  # fewer would leave tasks of too different a size


def emit_decode(spec: KernelSpec, a: PagedInputs) -> None:
    """Emit the body for inputs with a `mask`."""
    a = bind_lengths(spec, a)
    a = replace(a, rope=InlineRope(spec, a))
    heads, max_local_heads = spec.num_kv_heads, Blocking.of(spec).max_local_heads(spec)
    # Table entries times KV heads may exceed 32 bits, and so does what counts units.
    pages = wide_temp(a.page_indptr[a.batch_size])
    threads = num_threads()
    num_parts = -(-heads // max_local_heads)
    if max_local_heads > 1:
        is_enough = pages * num_parts >= threads * UNITS_PER_TASK
        num_parts = index_temp(T.if_then_else(is_enough, num_parts, heads))
    total = wide_temp(pages * num_parts)
    elements = pages * (heads * spec.page_size * spec.qk_head_dim)
    max_tasks = T.cast(T.min(T.cast(threads, "int64"), total), "int32")
    num_tasks = index_temp(T.if_then_else(elements > SERIAL_ELEMENTS, max_tasks, 1))
    # A piece reads as much, however many heads its units have.
    heads_of_unit = (heads + num_parts - 1) // num_parts
    min_units = T.max(1, MIN_ELEMENTS // (heads_of_unit * spec.page_size * spec.qk_head_dim))
    pieces = Pieces(total, num_tasks, min_units=index_temp(min_units))
    queue, states = Queue(), PartialStates(spec, pieces.count, max_local_heads * spec.group_size)
    ops = single_row_operands(spec, operands(spec, spec.kv_dtype), a.lengths.slot_of is not None)
    ops.begin([a.q, a.pages])

    def end_of(sequence):
        """The first unit behind those of a sequence."""
        return T.cast(a.page_indptr[sequence + 1], "int64") * num_parts

    def pages_of(sequence):
        """The first unit of a sequence, and the number of its pages."""
        first = index_temp(a.page_indptr[sequence])
        count = index_temp(a.page_indptr[sequence + 1] - first)
        return wide_temp(T.cast(first, "int64") * num_parts), count

    def task_body(task):
        split = DecodeSplit(spec, ops, a.sm_scale, max_local_heads)
        a.rope.begin_task()
        sequence = Register(1, "int32", T.int32(0))

        def attend_piece(_, piece):
            current = Register(1, "int64", pieces.begin(piece))
            last = pieces.begin(piece + 1)
            with T.While(current.get() < last):
                with T.While(end_of(sequence.get()) <= current.get()):
                    sequence.set(sequence.get() + 1)
                b = index_temp(sequence.get())
                first_unit, num_pages = pages_of(b)
                unit = wide_temp(current.get() - first_unit)
                part = index_temp(T.cast(unit // num_pages, "int32"))
                first_head, num_local_heads = heads_of(spec, part, num_parts)
                first_page = index_temp(T.cast(unit % num_pages, "int32"))
                last_page = T.min(T.cast(num_pages, "int64"), first_page + last - current.get())
                last_page = index_temp(T.cast(last_page, "int32"))
                kv_len = a.lengths.kv_len(b, num_pages)
                which = SingleRow(b, b, first_head, num_local_heads)
                attend_row(spec, a, split, which, Pages(first_page, last_page, num_pages, kv_len))
                num_rows = index_temp(num_local_heads * spec.group_size)
                with T.If(last_page - first_page == num_pages):
                    with T.Then():
                        Output(spec, a.o, a.lse, b, first_head).finish(split, num_rows)
                    with T.Else():
                        slot = piece * 2 + T.if_then_else(first_page > 0, 0, 1)
                        states.put(slot, split, num_rows, split.row_of)
                current.set(current.get() + (last_page - first_page))

        queue.for_units(1, lambda _: pieces.count, attend_piece)

    with ops.scope(), Queue.scope():
        for_tasks(num_tasks, task_body)

    # The pairs that were cut, found by their cuts.
    sequence = Register(1, "int32", T.int32(0))
    with T.serial(pieces.count - 1) as piece:
        at = pieces.begin(piece + 1)
        with T.While(end_of(sequence.get()) <= at):
            sequence.set(sequence.get() + 1)
        first_unit, num_pages = pages_of(sequence.get())
        part = index_temp(T.cast((at - first_unit) // num_pages, "int32"))
        begin = wide_temp(first_unit + T.cast(part, "int64") * num_pages)
        # Only the cut in the piece that begins the pair counts.
        with T.If(T.And(at > begin, pieces.begin(piece) <= begin)):
            with T.Then():
                count = Register(1, "int32", T.int32(1))  # of pieces that have a part of it
                next_begin = Register(1, "int64", at)
                with T.While(next_begin.get() < begin + num_pages):
                    count.set(count.get() + 1)
                    next_begin.set(pieces.begin(piece + count.get()))
                first_head, num_local_heads = heads_of(spec, part, num_parts)
                output = Output(spec, a.o, a.lse, sequence.get(), first_head)
                num_rows = num_local_heads * spec.group_size
                states.merge(piece, count.get(), output, rows=(0, num_rows))
    states.free()
    with T.serial(a.batch_size) as b:
        with T.If(a.page_indptr[b + 1] == a.page_indptr[b]):
            with T.Then():
                with T.serial(heads) as head:
                    Output(spec, a.o, a.lse, b, head).clear()


def decode(spec: KernelSpec, lengths: Lengths = Lengths.WINDOWS):
    """Build the kernel `decode`; its arguments are those of `signatures.decode.decode`."""

    def attend(a: PagedInputs) -> None:
        emit_decode(spec, replace(a, mask=CausalMask(1)))

    return build(spec, signatures.decode, attend, lengths=lengths)


def decode_windowed(spec: KernelSpec):
    """Build `decode` with ``length_info [3, B]``, as the stock cache passes it for windows."""
    return decode(spec, Lengths.MATRIX)
