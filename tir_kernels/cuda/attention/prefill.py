# SPDX-License-Identifier: Apache-2.0
"""Attention of several query rows per sequence, over pages or ragged arrays: one skeleton.

A block does one unit: a tile of a sequence's rows for one KV head. Which one, it finds out from
the starts of the sequences, so the host plans nothing. Of a sequence the last rows, which see most,
come first. Of units that are too few for the whole GPU, several blocks split what each sees.
"""

from __future__ import annotations

from types import SimpleNamespace

from tvm.script import tirx as T

from ...semantics.rotary_mode import require_own_rotation
from ...semantics.visibility import (
    CausalMask,
    WindowMask,
    lengths_of,
)
from ...signatures import PREFILL, PREFILL_RAGGED, with_lengths
from ...spec import KernelSpec
from ..emit import WARP, as_count, index_temp, launch, opaque
from ..splits.schedule import UnitOfBlock
from ..tiles.tiling import MOST_ROWS, Tiling
from ..tiles.tiling_choice import emit_chosen
from .define import attention_kernel
from .fixed_split_tile import SplitStates, SplitUnit, splits_of
from .kv_rows import RaggedRows, rows_of_pages
from .non_finite_v import Care, with_care
from .tree_mask import PlainColumns


def emit_attention(spec: KernelSpec, a: SimpleNamespace, tiling: Tiling) -> None:
    """Emit the body.

    Parameters
    ----------
    a : the matched arguments by their names, `mask`, and of the source of K and V `kv_rows`, which
        is ``(sequence, head) -> (rows, kv_len)``, where `rows` takes the rows of a thread, and
        `gap_of`, what a sequence has dropped, or None; `k_offset_of`, the RoPE position of its
        column 0; `most_positions` of a sequence, known to the host; perhaps `columns`. Without
        q_indptr every sequence has one row.
    tiling : Tiling
    """
    group = spec.group_size
    if hasattr(a, "rotary_mode"):
        require_own_rotation(spec, a)
    if not hasattr(a, "columns"):
        a.columns = PlainColumns()
    # No more units than that, for each sequence has less than a whole one besides whole ones.
    most_units = T.truncdiv(a.q.shape[0] * group, tiling.rows) + a.batch_size
    pairs = spec.num_kv_heads * tiling.slices
    splits = splits_of(tiling, most_units * pairs, a.most_positions)
    states = SplitStates(spec, splits, a.q.shape[0])

    def first_row_of(sequence):
        return a.q_indptr[sequence] if hasattr(a, "q_indptr") else sequence

    def rows_of(sequence):
        return first_row_of(sequence + 1) - first_row_of(sequence)

    def units_of(sequence):
        return T.truncdiv(rows_of(sequence) * group + tiling.rows - 1, tiling.rows)

    def attend(block, pair, split, thread, care: Care) -> None:
        lane = index_temp(T.truncmod(thread, WARP))
        unit = UnitOfBlock(block, a.batch_size, units_of, lane)
        with T.If(unit.sequence >= 0), T.Then():
            head = index_temp(T.truncdiv(pair, tiling.slices))
            rows, kv_len = a.kv_rows(unit.sequence, head)
            gap = a.gap_of(unit.sequence)
            k_offset = index_temp(a.k_offset_of(unit.sequence))
            num_hidden = 0 if gap is None else gap.begin - gap.sinks
            step = SimpleNamespace(
                sequence=unit.sequence,
                rows=rows,
                kv_len=kv_len,
                gap=gap,
                k_offset=k_offset,
                length=k_offset + kv_len - num_hidden,
                head=head,
                slice=index_temp(T.truncmod(pair, tiling.slices)),
                first_row=index_temp(first_row_of(unit.sequence)),
                num_rows=index_temp(rows_of(unit.sequence)),
                first=index_temp((unit.count - 1 - unit.index) * tiling.rows),
                split=split,
                is_whole=splits == 1,
                states=states,
            )
            SplitUnit(spec, tiling, a, step, thread, care).run()

    with states.allocated():
        grid = [most_units, pairs, splits]
        with launch(grid, tiling.num_threads, tiling.min_blocks) as (blocks, thread):
            with_care(lambda care: attend(*blocks, opaque(thread), care))
        states.launch_merge(a, lambda: first_row_of(a.batch_size))


def emit_paged(spec: KernelSpec, a: SimpleNamespace, most_rows: int = MOST_ROWS) -> None:
    """Emit `emit_attention` with K and V from pages."""
    lengths = lengths_of(spec, a, index_temp)
    a.gap_of = lengths.gap

    def kv_rows(sequence, head):
        first = index_temp(a.page_indptr[sequence])
        num_pages = index_temp(a.page_indptr[sequence + 1] - first)

        def rows(rows_per_thread: int):
            return rows_of_pages(spec, a, first, head, rows_per_thread)

        return rows, lengths.kv_len(sequence, num_pages)

    a.kv_rows, a.k_offset_of = kv_rows, lambda sequence: T.int32(0)
    a.most_positions = as_count(a.page_values.shape[0]) * spec.page_size
    if hasattr(a, "k_rope_pos_offset"):
        a.k_offset_of = a.k_rope_pos_offset.__getitem__
    choices = Tiling.choices(spec, spec.kv_dtype, most_rows)
    num_rows = as_count(a.q.shape[0]) * spec.group_size
    emit_chosen(choices, num_rows, a.batch_size, lambda tiling: emit_attention(spec, a, tiling))


def emit_ragged(spec: KernelSpec, a: SimpleNamespace, most_rows: int = MOST_ROWS) -> None:
    """Emit `emit_attention` with K and V from arrays."""
    a.gap_of = lambda sequence: None

    def kv_rows(sequence, head):
        first = index_temp(a.kv_indptr[sequence])
        kv_len = index_temp(a.kv_indptr[sequence + 1] - first)
        return lambda rows_per_thread: RaggedRows(a, first, head), kv_len

    a.kv_rows, a.most_positions = kv_rows, a.k.shape[0]
    if hasattr(a, "k_rope_pos_offset"):
        a.k_offset_of = a.k_rope_pos_offset.__getitem__
    else:
        a.k_offset_of = a.columns.first_of_ragged
    emit_attention(spec, a, Tiling.of(spec, spec.dtype, most_rows))


def build(spec: KernelSpec, names, mask_of, emit=emit_paged, **fields):
    """Build a kernel: ``mask_of(a)`` is its mask, `fields` go to `emit`."""

    def body(a):
        a.mask = mask_of(a)
        emit(spec, a, **fields)

    return attention_kernel(spec, names, body)


def _causal(a):
    return CausalMask(a.causal)


def _window(a):
    return WindowMask(a.causal, a.window)


def prefill(spec: KernelSpec):
    """Build the kernel `prefill`; its arguments are those of the CPU's."""
    return build(spec, PREFILL, _causal)


def prefill_windowed(spec: KernelSpec):
    """Build the kernel `prefill_windowed`; its arguments are those of the CPU's."""
    return build(spec, with_lengths(PREFILL, "window_matrix"), _causal)


def prefill_sliding(spec: KernelSpec):
    """Build the kernel `prefill_sliding`; its arguments are those of the CPU's."""
    return build(spec, (*with_lengths(PREFILL, "length_info"), "window"), _window)


def prefill_ragged(spec: KernelSpec):
    """Build the kernel `prefill_ragged`; its arguments are those of the CPU's."""
    return build(spec, PREFILL_RAGGED, _causal, emit_ragged)


def prefill_ragged_sliding(spec: KernelSpec):
    """Build the kernel `prefill_ragged_sliding`; its arguments are those of the CPU's."""
    return build(spec, (*PREFILL_RAGGED, "window"), _window, emit_ragged)
