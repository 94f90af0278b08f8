# SPDX-License-Identifier: Apache-2.0
"""Attention of several query rows per sequence, over pages or ragged arrays: one skeleton.

A block takes a tile of a sequence's rows for one KV head. Which one, it finds out from the starts
of the sequences, so the host plans nothing. Of a sequence the last rows, which see most, come
first. If the tiles are too few for the whole GPU, several blocks split the columns of each.
`signatures.prefill` has the arguments.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from tvm.script import tirx as T

from ...semantics.rotary_mode import require_own_rotation
from ...semantics.visibility import (
    CausalMask,
    WindowMask,
    lengths_of,
)
from ...signatures import prefill as signatures
from ...signatures.inputs import Lengths, PagedInputs, RaggedInputs
from ...spec import KernelSpec
from ..components.kv_rows import RaggedRows, rows_of_pages, with_page_views
from ..emit import WARP, as_count, index_temp, launch, opaque
from ..splits.work_item import WorkItem
from ..tiles.tiling import MAX_ROWS, Tiling
from ..tiles.tiling_choice import emit_chosen
from .fixed_split_tile import FixedSplitStates, FixedSplitTile, splits_of
from .non_finite_v import NonFiniteGuard, with_guard
from .tile_step import FixedSplitStep
from .tree_mask import NoTree


@dataclass(frozen=True)
class KvSource:
    """The source of K and V of a call.

    Parameters
    ----------
    rows : callable
        ``(sequence, head) -> (rows, kv_len)``, where `rows` takes the rows of a thread.
    k_offset_of : callable
        Sequence -> RoPE position of its column 0.
    max_positions : integer expression
        No sequence has more of them; known to the host.
    """

    rows: Callable
    k_offset_of: Callable
    max_positions: object


def emit_attention(
    spec: KernelSpec, a: PagedInputs | RaggedInputs, source: KvSource, tiling: Tiling
) -> None:
    """Emit the body for inputs with a `mask`; without `q_indptr` every sequence has one row."""
    group = spec.group_size
    if a.rotary_mode is not None:
        require_own_rotation(spec, a)
    if a.tree is None:
        a = replace(a, tree=NoTree())
    # An upper bound: each sequence has at most one partial tile.
    max_tiles = T.truncdiv(a.q.shape[0] * group, tiling.rows) + a.batch_size
    pairs = spec.num_kv_heads * tiling.slices
    splits = splits_of(tiling, max_tiles * pairs, source.max_positions)
    states = FixedSplitStates(spec, splits, a.q.shape[0])

    def first_row_of(sequence):
        return sequence if a.q_indptr is None else a.q_indptr[sequence]

    def rows_of(sequence):
        return first_row_of(sequence + 1) - first_row_of(sequence)

    def tiles_of(sequence):
        return T.truncdiv(rows_of(sequence) * group + tiling.rows - 1, tiling.rows)

    def attend(block, pair, split, thread, guard: NonFiniteGuard) -> None:
        lane = index_temp(T.truncmod(thread, WARP))
        tile = WorkItem(block, a.batch_size, tiles_of, lane)
        with T.If(tile.sequence >= 0), T.Then():
            head = index_temp(T.truncdiv(pair, tiling.slices))
            rows, kv_len = source.rows(tile.sequence, head)
            gap = a.gap(tile.sequence)
            k_offset = index_temp(source.k_offset_of(tile.sequence))
            num_hidden = 0 if gap is None else gap.begin - gap.sinks
            step = FixedSplitStep(
                sequence=tile.sequence,
                rows=rows,
                kv_len=kv_len,
                gap=gap,
                k_offset=k_offset,
                length=k_offset + kv_len - num_hidden,
                head=head,
                slice=index_temp(T.truncmod(pair, tiling.slices)),
                first_row=index_temp(first_row_of(tile.sequence)),
                num_rows=index_temp(rows_of(tile.sequence)),
                first=index_temp((tile.count - 1 - tile.index) * tiling.rows),
                split=split,
                is_whole=splits == 1,
                states=states,
            )
            FixedSplitTile(spec, tiling, a, step, thread, guard).run()

    with states.allocated():
        grid = [max_tiles, pairs, splits]
        with launch(grid, tiling.num_threads, tiling.min_blocks) as (blocks, thread):
            with_guard(lambda guard: attend(*blocks, opaque(thread), guard), tiling)
        states.launch_merge(a, lambda: first_row_of(a.batch_size))


def emit_paged(spec: KernelSpec, a: PagedInputs, max_rows: int = MAX_ROWS) -> None:
    """Emit `emit_attention` with K and V from pages."""
    a = with_page_views(spec, a)
    a = replace(a, lengths=lengths_of(spec, a, index_temp))

    def kv_rows(sequence, head):
        first = index_temp(a.page_indptr[sequence])
        num_pages = index_temp(a.page_indptr[sequence + 1] - first)

        def rows(rows_per_thread: int):
            return rows_of_pages(spec, a, first, head, rows_per_thread)

        return rows, a.lengths.kv_len(sequence, num_pages)

    source = KvSource(
        rows=kv_rows,
        k_offset_of=_offsets_of(a) or (lambda sequence: T.int32(0)),
        max_positions=as_count(a.page_values.shape[0]) * spec.page_size,
    )
    choices = Tiling.choices(spec, spec.kv_dtype, max_rows)
    num_rows = as_count(a.q.shape[0]) * spec.group_size

    def emit(tiling: Tiling) -> None:
        emit_attention(spec, a, source, tiling)

    emit_chosen(choices, num_rows, a.batch_size, emit)


def emit_ragged(spec: KernelSpec, a: RaggedInputs, max_rows: int = MAX_ROWS) -> None:
    """Emit `emit_attention` with K and V from arrays."""

    def kv_rows(sequence, head):
        first = index_temp(a.kv_indptr[sequence])
        kv_len = index_temp(a.kv_indptr[sequence + 1] - first)

        def rows(rows_per_thread: int):
            ragged = RaggedRows(a.k, a.v)
            ragged.begin(first, head)
            return ragged

        return rows, kv_len

    source = KvSource(
        rows=kv_rows,
        k_offset_of=_offsets_of(a) or a.tree.first_of_ragged,
        max_positions=a.k.shape[0],
    )
    emit_attention(spec, a, source, Tiling.of(spec, spec.dtype, max_rows))


def _offsets_of(a: PagedInputs | RaggedInputs) -> Callable | None:
    offsets = a.k_rope_pos_offset
    return None if offsets is None else offsets.__getitem__


def prefill(spec: KernelSpec, lengths: Lengths = Lengths.WINDOWS):
    """Build the kernel `prefill`; its arguments are those of `signatures.prefill.prefill`."""

    def attend(a: PagedInputs) -> None:
        emit_paged(spec, replace(a, mask=CausalMask(a.causal)))

    return signatures.prefill(spec, attend, lengths)


def prefill_windowed(spec: KernelSpec):
    """Build `prefill` with ``length_info [3, B]``, as the stock cache passes it for windows."""
    return prefill(spec, Lengths.MATRIX)


def prefill_sliding(spec: KernelSpec):
    """Build the kernel `prefill_sliding`; see `signatures.prefill.prefill_sliding`."""

    def attend(a: PagedInputs) -> None:
        emit_paged(spec, replace(a, mask=WindowMask(a.causal, a.window)))

    return signatures.prefill_sliding(spec, attend)


def prefill_ragged(spec: KernelSpec):
    """Build the kernel `prefill_ragged`; see `signatures.prefill.prefill_ragged`."""

    def attend(a: RaggedInputs) -> None:
        emit_ragged(spec, replace(a, mask=CausalMask(a.causal)))

    return signatures.prefill_ragged(spec, attend)


def prefill_ragged_sliding(spec: KernelSpec):
    """Build the kernel `prefill_ragged_sliding`; see `signatures.prefill`."""

    def attend(a: RaggedInputs) -> None:
        emit_ragged(spec, replace(a, mask=WindowMask(a.causal, a.window)))

    return signatures.prefill_ragged_sliding(spec, attend)
