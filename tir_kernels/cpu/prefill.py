# SPDX-License-Identifier: Apache-2.0
"""Attention of several query rows per sequence, over pages or ragged arrays: one skeleton.

A unit of work is a tile of a sequence's tokens with all query heads of one KV head. It walks over
tiles of positions: K is transposed and V copied into packed tiles once, and all rows of the unit
multiply with them, a few at a time through the registers. Tiles that no row may see are skipped.
"""

from __future__ import annotations

from types import SimpleNamespace

from tvm.script import tirx as T

from ..masks import CausalMask, GappedSequence, WholeSequence
from ..spec import KernelSpec
from .arguments import OUTPUTS, POSITIONS, SCALARS, WINDOWED_PAGES, attention_kernel, with_lengths
from .bf16 import PairOperands
from .inline_rope import InlineRope, has_rope
from .operands import Float32Operands
from .prefill_unit import Tiling, Unit
from .rows import PagedRows, RaggedRows
from .simd import Register, index_temp
from .tasks import for_tasks, num_threads

PREFILL = ("q", "q_indptr", *WINDOWED_PAGES, *POSITIONS, *OUTPUTS, "causal", *SCALARS)
PREFILL_RAGGED = (
    *("q", "q_indptr", "k", "v", "kv_indptr", "q_rope_position", "k_rope_pos_offset"),
    *(*OUTPUTS, "causal", *SCALARS),
)
SERIAL_WORK = 1 << 20  # multiply-adds below which a launch costs more than it saves


def emit_prefill(spec: KernelSpec, ops, a: SimpleNamespace) -> None:
    """Emit the body.

    Units are numbered with the heavy, late tiles of a sequence first and dealt to the tasks in
    turn, backwards in every other round, so that tasks get equal shares of a causal triangle.

    Parameters
    ----------
    ops : operands object
    a : the matched arguments by their names, `mask`, and of the source of K and V `kv_rows`, which
        is ``(sequence, head) -> (rows, kv_len)``, `kv_buffers` and `num_positions`.
    """
    heads, tokens = spec.num_kv_heads, Tiling.of(spec).tokens
    # Multiply-adds, as if all sequences were alike.
    rows, positions = (T.cast(x, "int64") for x in (a.q_indptr[a.batch_size], a.num_positions))
    work = rows * (spec.num_qo_heads * spec.qk_head_dim) * positions // T.max(a.batch_size, 1)
    num_tasks = index_temp(T.if_then_else(work > SERIAL_WORK, num_threads(), 1))
    a.rope = InlineRope(spec, a)
    a.mask.prepare(a)
    ops.begin([b for b in (a.q, *a.kv_buffers) if str(b.dtype) == "bfloat16"])

    def task_body(task):
        unit = Unit(spec, ops)
        a.rope.begin_task()
        a.mask.begin_task()
        round_ = Register(1, "int32", T.int32(0))
        before = Register(1, "int32", T.int32(0))  # units of earlier sequences

        def current():
            """The unit that the task does in this round."""
            turn = T.if_then_else(round_.get() % 2 == 0, task, num_tasks - 1 - task)
            return round_.get() * num_tasks + turn

        with T.serial(a.batch_size) as b:
            first_row = index_temp(a.q_indptr[b])
            num_rows = index_temp(a.q_indptr[b + 1] - first_row)
            num_tiles = index_temp((num_rows + tokens - 1) // tokens)
            with T.While(current() < before.get() + num_tiles * heads):
                index = index_temp(current() - before.get())
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
                round_.set(round_.get() + 1)
            before.set(before.get() + num_tiles * heads)

    with ops.scope():
        for_tasks(num_tasks, task_body)


def operands(spec: KernelSpec, kv_dtype: str):
    """Choose the operands for a spec and the type of K and V."""
    target = spec.target
    if target.has_bf16_dot and target.lanes == PairOperands.lanes:
        # Both numbers of a pair have to rotate alike.
        pairs = spec.rope.rotary_dim % 4 == 0 or not has_rope(spec)
        if spec.dtype == kv_dtype == "bfloat16" and pairs:
            return PairOperands()
    return Float32Operands(spec.target.lanes)


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


def emit_paged(spec: KernelSpec, a: SimpleNamespace) -> None:
    """Emit `prefill` with rows from pages."""
    has_gaps = not hasattr(a, "length_info")
    a.lengths = GappedSequence(spec, a) if has_gaps else WholeSequence(spec, a.length_info)
    a.gap_of = a.lengths.gap if has_gaps else lambda sequence: None

    def kv_rows(sequence, head):
        first = index_temp(a.page_indptr[sequence])
        num_pages = index_temp(a.page_indptr[sequence + 1] - first)
        rows = PagedRows(
            spec,
            a.pages,
            a.page_values,
            first,
            first + num_pages - 1,
            head=head,
            slot_of=a.lengths.slot_of,
        )
        return rows, a.lengths.kv_len(sequence, num_pages)

    a.kv_rows, a.kv_buffers = kv_rows, [a.pages]
    a.num_positions = a.page_indptr[a.batch_size] * spec.page_size
    emit_prefill(spec, operands(spec, spec.kv_dtype), a)


def emit_ragged(spec: KernelSpec, a: SimpleNamespace) -> None:
    """Emit `prefill_ragged` with rows from arrays."""

    def kv_rows(sequence, head):
        first = index_temp(a.kv_indptr[sequence])
        kv_len = index_temp(a.kv_indptr[sequence + 1] - first)
        return RaggedRows(a.k, a.v, first, first + kv_len - 1, head=head), kv_len

    a.kv_rows, a.kv_buffers = kv_rows, [a.k, a.v]
    a.gap_of = lambda sequence: None
    a.num_positions = a.kv_indptr[a.batch_size]
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
