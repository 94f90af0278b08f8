# SPDX-License-Identifier: Apache-2.0
"""Attention of several query rows per sequence, over pages or ragged arrays: one skeleton.

A unit of work is a tile of a sequence's tokens with all query heads of one KV head. It walks over
tiles of positions: K is transposed and V copied into packed tiles once, and all rows of the unit
multiply with them, a few at a time through the registers. Tiles that no row may see are skipped.
"""

from __future__ import annotations

from types import SimpleNamespace

from tvm.script import tirx as T

from ....semantics.visibility import CausalMask
from ....signatures import (
    PREFILL,
    PREFILL_RAGGED,
    with_lengths,
)
from ....spec import KernelSpec
from ...simd import index_temp
from ...tasks import Queue, for_tasks, num_threads
from ..decode.single_row import Singles, bind_lengths, paged_rows
from ..define import attention_kernel
from ..inline_rope import InlineRope
from ..kv_operands import operands
from ..kv_rows import RaggedRows
from .tile import Tiling, Unit

SERIAL_WORK = 1 << 20  # multiply-adds below which a launch costs more than it saves
UNITS_OF_TASK = 8  # with fewer, units are halved, so that tasks finish together


def emit_prefill(spec: KernelSpec, ops, a: SimpleNamespace) -> None:
    """Emit the body.

    Tasks take units from queues: those of a sequence begin with the heavy, late tiles of a causal
    triangle. Where there is `attend_single`, sequences of one row have a queue of their own. Half
    of the tasks begin with it, so that reading and multiplying go on at the same time.

    Parameters
    ----------
    ops : operands object
    a : the matched arguments by their names, `mask`, `gap_of`, and `singles` or None; of the source
        of K and V `kv_rows`, which is ``(sequence, head) -> (rows, kv_len)``, `kv_buffers` and
        `num_positions`, int64.
    """
    # Multiply-adds, as if all sequences were alike.
    rows, positions = T.cast(a.q_indptr[a.batch_size], "int64"), a.num_positions
    work = rows * (spec.num_qo_heads * spec.qk_head_dim) * positions // T.max(a.batch_size, 1)
    num_tasks = index_temp(T.if_then_else(work > SERIAL_WORK, num_threads(), 1))
    most = Tiling.of(spec).tokens
    has_many = rows * spec.num_kv_heads >= num_tasks * (UNITS_OF_TASK * most)
    tokens = index_temp(T.if_then_else(has_many, most, (most + 1) // 2))
    a.rope = InlineRope(spec, a)
    a.mask.prepare(a)
    ops.begin([b for b in (a.q, *a.kv_buffers) if str(b.dtype) == "bfloat16"])
    queues = [Queue() for _ in range(2 if a.singles else 1)]

    def task_body(task):
        unit = Unit(spec, ops)
        a.rope.begin_task()
        a.mask.begin_task()
        if not a.singles:
            _attend_tiles(spec, a, unit, queues[0], tokens)
            return
        a.singles.begin_task()
        with T.serial(2) as turn, T.If((task + turn) % 2 == 0):
            with T.Then():
                a.singles.attend(queues[1], num_tasks)
            with T.Else():
                _attend_tiles(spec, a, unit, queues[0], tokens)

    with ops.scope(), Queue.scope():
        for_tasks(num_tasks, task_body)


def _attend_tiles(spec: KernelSpec, a, unit: Unit, queue: Queue, tokens) -> None:
    """Do the units of a queue: tiles of `tokens` with the query heads of one KV head."""
    heads = spec.num_kv_heads

    def num_units(b):
        num_rows = index_temp(a.q_indptr[b + 1] - a.q_indptr[b])
        num_tiles = (num_rows + tokens - 1) // tokens
        return heads * (T.if_then_else(a.singles.has(b), 0, num_tiles) if a.singles else num_tiles)

    def attend_tile(b, index):
        first_row = index_temp(a.q_indptr[b])
        num_rows = index_temp(a.q_indptr[b + 1] - first_row)
        num_tiles = index_temp((num_rows + tokens - 1) // tokens)
        head = index_temp(index % heads)
        first_token = index_temp((num_tiles - 1 - index // heads) * tokens)
        rows, kv_len = a.kv_rows(b, head)
        k_offset = index_temp(a.k_rope_pos_offset[b])
        gap = a.gap_of(b)
        num_hidden = 0 if gap is None else gap.begin - gap.sinks
        a.rope.begin_sequence(k_offset + kv_len - num_hidden)
        a.mask.begin_sequence(b, kv_len)
        unit.run(
            a,
            SimpleNamespace(
                rows=rows,
                kv_len=kv_len,
                gap=gap,
                k_offset=k_offset,
                head=head,
                first_row=first_row,
                num_rows=num_rows,
                first_token=first_token,
                num_tokens=index_temp(T.min(tokens, num_rows - first_token)),
            ),
        )

    queue.for_units(a.batch_size, num_units, attend_tile)


def prefill(spec: KernelSpec):
    """Build the kernel `prefill`: attention of several query rows per sequence over its pages.

    Its arguments are, with T rows, B sequences, P pages of the pool and N page table entries

    * q ``[T, Hq, D]``, dtype; q_indptr ``[B + 1]``, int32;
    * pages ``[P, 2, Hk, page, D]``, kv_dtype;
    * page_indptr ``[B + 1]``, page_values ``[N]``, length_info ``[B]`` (or more, for windows of
      sequences: see `masks.GappedSequence`), k_rope_pos_offset ``[B]`` and q_rope_position ``[T]``,
      int32; int32 arrays may start at any element;
    * o ``[T, Hq, D]``, dtype, and lse ``[T, Hq]``, float32, which are written;
    * causal, rotary_mode: int32, rope_scale, rope_theta, sm_scale: float32.
    """

    return _prefill(spec, "window_info")


def prefill_windowed(spec: KernelSpec):
    """Build `prefill` with ``length_info [3, B]``, as the stock cache passes it for windows.

    Its rows are those of the `masks.GappedSequence`: a sequence holds the slots before the third
    and from the second number on. All rows of a step see what the first one does.
    """
    return _prefill(spec, "window_matrix")


def _prefill(spec: KernelSpec, lengths: str):
    def emit(a):
        a.mask = CausalMask(a.causal)
        emit_paged(spec, a)

    return attention_kernel(spec, with_lengths(PREFILL, lengths), emit)


def emit_paged(spec: KernelSpec, a: SimpleNamespace, has_trees: bool = False) -> None:
    """Emit `prefill` with rows from pages."""
    bind_lengths(spec, a)

    def kv_rows(sequence, head):
        first = index_temp(a.page_indptr[sequence])
        num_pages = index_temp(a.page_indptr[sequence + 1] - first)
        rows = paged_rows(spec, a, first, num_pages, head)
        return rows, a.lengths.kv_len(sequence, num_pages)

    a.kv_rows, a.kv_buffers = kv_rows, [a.pages]
    a.num_positions = T.cast(a.page_indptr[a.batch_size], "int64") * spec.page_size
    ops = operands(spec, spec.kv_dtype)
    a.singles = None if has_trees else Singles(spec, ops, a)
    emit_prefill(spec, ops, a)


def emit_ragged(spec: KernelSpec, a: SimpleNamespace) -> None:
    """Emit `prefill_ragged` with rows from arrays."""

    def kv_rows(sequence, head):
        first = index_temp(a.kv_indptr[sequence])
        kv_len = index_temp(a.kv_indptr[sequence + 1] - first)
        return RaggedRows(a.k, a.v, first, first + kv_len - 1, head=head), kv_len

    a.kv_rows, a.kv_buffers = kv_rows, [a.k, a.v]
    a.gap_of, a.singles = lambda sequence: None, None
    a.num_positions = T.cast(a.kv_indptr[a.batch_size], "int64")
    emit_prefill(spec, operands(spec, spec.dtype), a)


def prefill_ragged(spec: KernelSpec):
    """Build the kernel `prefill_ragged`: attention over K and V that are ragged arrays.

    Its arguments are, with T rows of Q and S of K and V in B sequences

    * q ``[T, Hq, Dqk]``, dtype; q_indptr ``[B + 1]``, int32;
    * k ``[S, Hk, Dqk]``, v ``[S, Hk, Dv]``, dtype; kv_indptr ``[B + 1]``, int32;
    * q_rope_position ``[T]``, k_rope_pos_offset ``[B]``, int32; int32 arrays may start at any
      element;
    * o ``[T, Hq, Dv]``, dtype, and lse ``[T, Hq]``, float32, which are written;
    * causal, rotary_mode: int32, rope_scale, rope_theta, sm_scale: float32.
    """

    def emit(a):
        a.mask = CausalMask(a.causal)
        emit_ragged(spec, a)

    return attention_kernel(spec, PREFILL_RAGGED, emit)
