# SPDX-License-Identifier: Apache-2.0
"""Attention of several query rows per sequence, over pages or ragged arrays: one skeleton.

Tasks take tiles of a sequence's tokens with all query heads of one KV head. A task walks over tiles
of positions: K is transposed and V copied into packed tiles once, and all rows of the tile multiply
with them, a few at a time through the registers. Tiles that no row may see are skipped.
`signatures.prefill` has the arguments.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace

from tvm.script import tirx as T

from ....semantics.visibility import CausalMask
from ....signatures import prefill as signatures
from ....signatures.inputs import Lengths, PagedInputs, RaggedInputs
from ....spec import KernelSpec
from ...components.work import Queue, for_tasks, num_threads
from ...simd import index_temp
from ..decode.code_split import scope_of
from ..decode.single_row import Singles, bind_lengths, paged_rows
from ..define import build
from ..kv_operands import operands
from ..kv_rows import RaggedRows
from ..rotation import rotation_of
from .tile import PrefillTile
from .tiling import PrefillStep, Tiling

SERIAL_WORK = 1 << 20  # multiply-adds below which a launch costs more than it saves
TILES_PER_TASK = 8  # with fewer, tiles are halved, so that tasks finish together


@dataclass(frozen=True)
class KvSource:
    """The source of K and V of a call.

    Parameters
    ----------
    rows : callable
        ``(sequence, head) -> (rows, kv_len)``
    buffers : sequence of Buffer
    num_positions : int64 expression
        Of the whole batch.
    has_singles : bool
        Whether sequences of one row are attended to as in decode.
    """

    rows: Callable
    buffers: Sequence
    num_positions: object
    has_singles: bool = False


def emit_prefill(spec: KernelSpec, ops, a: PagedInputs | RaggedInputs, source: KvSource) -> None:
    """Emit the body.

    Tasks take tiles from a queue: those of a sequence begin with the heavy, late tiles of a causal
    triangle. Where there are `Singles`, sequences of one row have a queue of their own. Half
    of the tasks begin with it, so that reading and multiplying go on at the same time.

    Parameters
    ----------
    ops : operands object
    a : the inputs with a `mask`, and with a `rope` unless that is `InlineRope`.
    source : KvSource
    """
    # Multiply-adds, as if all sequences were alike.
    rows, positions = T.cast(a.q_indptr[a.batch_size], "int64"), source.num_positions
    work = rows * (spec.num_qo_heads * spec.qk_head_dim) * positions // T.max(a.batch_size, 1)
    num_tasks = index_temp(T.if_then_else(work > SERIAL_WORK, num_threads(), 1))
    max_tokens = Tiling.of(spec).tokens
    has_many = rows * spec.num_kv_heads >= num_tasks * (TILES_PER_TASK * max_tokens)
    tokens = index_temp(T.if_then_else(has_many, max_tokens, (max_tokens + 1) // 2))
    a = a if a.rope else replace(a, rope=rotation_of(spec, a))
    singles = Singles(spec, ops, a) if source.has_singles else None
    a.mask.prepare(a)
    ops.begin([b for b in (a.q, *source.buffers) if str(b.dtype) == "bfloat16"])
    queues = [Queue() for _ in range(2 if singles else 1)]
    for queue in queues:
        queue.begin()

    def task_body(task):
        tile = PrefillTile(spec, ops)
        a.rope.begin_task()
        a.mask.begin_task()
        if not singles:
            _attend_tiles(spec, a, source, singles, tile, queues[0], tokens)
            return
        singles.begin_task()
        with T.serial(2) as turn, T.If((task + turn) % 2 == 0):
            with T.Then():
                singles.attend(queues[1], num_tasks)
            with T.Else():
                _attend_tiles(spec, a, source, singles, tile, queues[0], tokens)

    with ops.scope(), Queue.scope(), scope_of(spec) if singles else nullcontext():
        for_tasks(num_tasks, task_body)


def _attend_tiles(
    spec: KernelSpec, a, source: KvSource, singles, tile: PrefillTile, queue, tokens
) -> None:
    """Attend with the tiles of a queue: `tokens` with the query heads of one KV head."""
    heads = spec.num_kv_heads

    def num_tiles_of(b):
        num_rows = index_temp(a.q_indptr[b + 1] - a.q_indptr[b])
        num_tiles = (num_rows + tokens - 1) // tokens
        return heads * (T.if_then_else(singles.has(b), 0, num_tiles) if singles else num_tiles)

    def attend_tile(b, index):
        first_row = index_temp(a.q_indptr[b])
        num_rows = index_temp(a.q_indptr[b + 1] - first_row)
        num_tiles = index_temp((num_rows + tokens - 1) // tokens)
        head = index_temp(index % heads)
        first_token = index_temp((num_tiles - 1 - index // heads) * tokens)
        rows, kv_len = source.rows(b, head)
        k_offset = index_temp(a.k_rope_pos_offset[b])
        gap = a.gap(b)
        num_hidden = 0 if gap is None else gap.begin - gap.sinks
        a.rope.begin_sequence(k_offset + kv_len - num_hidden)
        a.mask.begin_sequence(b, kv_len)
        tile.run(
            a,
            PrefillStep(
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

    queue.for_items(a.batch_size, num_tiles_of, attend_tile)


def emit_paged(spec: KernelSpec, a: PagedInputs, has_singles: bool = True) -> None:
    """Emit `prefill` with rows from pages."""
    a = bind_lengths(spec, a)

    def kv_rows(sequence, head):
        first = index_temp(a.page_indptr[sequence])
        num_pages = index_temp(a.page_indptr[sequence + 1] - first)
        rows = paged_rows(spec, a, first, num_pages, head)
        return rows, a.lengths.kv_len(sequence, num_pages)

    num_positions = T.cast(a.page_indptr[a.batch_size], "int64") * spec.page_size
    source = KvSource(kv_rows, [a.pages], num_positions, has_singles)
    emit_prefill(spec, operands(spec, spec.kv_dtype), a, source)


def emit_ragged(spec: KernelSpec, a: RaggedInputs) -> None:
    """Emit `prefill_ragged` with rows from arrays."""

    def kv_rows(sequence, head):
        first = index_temp(a.kv_indptr[sequence])
        kv_len = index_temp(a.kv_indptr[sequence + 1] - first)
        return RaggedRows(a.k, a.v, first, first + kv_len - 1, head=head), kv_len

    num_positions = T.cast(a.kv_indptr[a.batch_size], "int64")
    emit_prefill(spec, operands(spec, spec.dtype), a, KvSource(kv_rows, [a.k, a.v], num_positions))


def prefill(spec: KernelSpec, lengths: Lengths = Lengths.WINDOWS):
    """Build the kernel `prefill`; its arguments are those of `signatures.prefill.prefill`."""

    def attend(a: PagedInputs) -> None:
        emit_paged(spec, replace(a, mask=CausalMask(a.causal)))

    return build(spec, signatures.prefill, attend, lengths=lengths)


def prefill_windowed(spec: KernelSpec):
    """Build `prefill` with ``length_info [3, B]``, as the stock cache passes it for windows.

    A sequence holds the slots before the third and from the second number on, as
    `visibility.GappedSequence` describes. All rows of a step see what the first one does.
    """
    return prefill(spec, Lengths.MATRIX)


def prefill_ragged(spec: KernelSpec):
    """Build the kernel `prefill_ragged`; see `signatures.prefill.prefill_ragged`."""

    def attend(a: RaggedInputs) -> None:
        emit_ragged(spec, replace(a, mask=CausalMask(a.causal)))

    return build(spec, signatures.prefill_ragged, attend, has_pages=False)
