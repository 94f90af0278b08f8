# SPDX-License-Identifier: Apache-2.0
"""Attention of one query row per sequence over its pages.

The work is bound by reading K and V once, so it is split by pages: as many blocks as the GPU holds
take equal splits of the pages of all sequences and KV heads, whatever their lengths are. A block
finds its split from the page table's starts, so every batch of a shape is launched alike. A pair of
a sequence and a KV head that falls into one split is finished there; one that is cut leaves partial
states, which a second kernel merges. `signatures.decode` has the arguments.
"""

from __future__ import annotations

from dataclasses import replace

from tvm.script import tirx as T

from ...semantics.rotary_mode import has_rope, require_own_rotation
from ...semantics.visibility import (
    CausalMask,
    Span,
    WindowMask,
    lengths_of,
)
from ...signatures import decode as signatures
from ...signatures.inputs import Lengths, PagedInputs
from ...spec import KernelSpec
from ..components.kv_rows import rows_of_pages, with_page_views
from ..elements import store_floats
from ..emit import I32, I64, Variable, as_count, count_temp, index_temp, launch
from ..launcher import resident_blocks
from ..splits.block_states import BlockStates
from ..splits.page_schedule import PageSchedule
from ..tiles.decode_tiling import DecodeTiling
from .decode_split import DecodeSplit, DecodeStep

_MAX_PACKED_COLUMNS = 128  # of V with codes of 4 bits: 256 spilled 148 bytes


def emit_decode(spec: KernelSpec, a: PagedInputs) -> None:
    """Emit the body for inputs with a `mask`."""
    require_own_rotation(spec, a)
    a = with_page_views(spec, a)
    tiling = DecodeTiling.of(spec)
    has_registers = spec.codec and (spec.codec.bits == 8 or tiling.columns <= _MAX_PACKED_COLUMNS)
    if not has_registers or not tiling.is_tensor:
        _emit_tiles(spec, a, tiling)
        return
    # Codes are widened in registers, unless K has to be rotated before it is multiplied.
    without_rope, of_codes = replace(a, rotary_mode=None), DecodeTiling.of(spec, is_widened=False)
    if a.rotary_mode is None or not has_rope(spec):
        _emit_tiles(spec, without_rope, of_codes)
        return
    with T.If(a.rotary_mode == 1):
        with T.Then():
            _emit_tiles(spec, a, tiling)
        with T.Else():
            _emit_tiles(spec, without_rope, of_codes)


def _emit_tiles(spec: KernelSpec, a: PagedInputs, tiling: DecodeTiling) -> None:
    lengths = lengths_of(spec, a, index_temp)
    num_slices = tiling.row_slices * tiling.slices
    num_blocks = resident_blocks(tiling.num_bytes, tiling.min_blocks, num_slices)
    states = BlockStates(spec, num_blocks)
    split = _PageSplit(spec, tiling, a, lengths, states)
    with states.allocated():
        grid = [num_blocks, num_slices]
        with launch(grid, tiling.num_threads, tiling.min_blocks) as ((block, slice_id), thread):
            split.attend(block, slice_id, thread)
        states.launch_merge(a, lambda lane: split.schedule(), clears_empty=True)


class _PageSplit:
    """The work of a block: it attends to its split of the pages, pair by pair."""

    def __init__(
        self,
        spec: KernelSpec,
        tiling: DecodeTiling,
        a: PagedInputs,
        lengths,
        states: BlockStates,
    ) -> None:
        self.spec, self.tiling, self.a = spec, tiling, a
        self.lengths, self.states = lengths, states

    def schedule(self) -> PageSchedule:
        return PageSchedule(self.spec, self.a, self.states.num_blocks, self.tiling.block_positions)

    def attend(self, block, slice_id, thread) -> None:
        """Attend to the split of `block`: the end of one pair, whole pairs, and the next begun."""
        schedule = self.schedule()
        current = Variable(as_count(block) * schedule.split_size, I64)
        last = count_temp(T.min(current.get() + schedule.split_size, schedule.total))
        with T.If(current.get() < last), T.Then():
            rows = DecodeSplit(self.spec, self.tiling, self.a, slice_id, thread)
            sequence = Variable(schedule.owner(current.get(), rows.lane))
            with T.While(current.get() < last):
                with T.While(schedule.first_kv_tile(sequence.get() + 1) <= current.get()):
                    sequence.set(sequence.get() + 1)
                pair = schedule.pair(sequence.get(), current.get())
                first = count_temp(current.get())
                current.set(T.min(pair.end, last))
                bounds = [
                    index_temp(T.cast(at - pair.begin, I32) * schedule.positions)
                    for at in (first, current.get())
                ]
                self._attend_to_pair(rows, pair, bounds)
                is_whole = T.And(first == pair.begin, current.get() == pair.end)
                slot = self.states.slot(block, first > pair.begin)
                self._store(rows, pair, is_whole, slot)

    def _attend_to_pair(self, rows: DecodeSplit, pair, bounds) -> None:
        """Attend to the positions of a pair between `bounds` that its row sees."""
        a = self.a
        kv_len = self.lengths.kv_len(pair.sequence, pair.num_pages)
        gap = self.lengths.gap(pair.sequence)
        k_offset = index_temp(a.k_rope_pos_offset[pair.sequence])
        num_hidden = 0 if gap is None else gap.begin - gap.sinks
        kv_rows = rows_of_pages(
            self.spec, a, pair.first_entry, pair.head, self.tiling.rows_per_thread
        )
        step = DecodeStep(pair=pair, rows=kv_rows, length=k_offset + kv_len - num_hidden)

        def attend(span: Span, first_seen) -> None:
            begin = index_temp(T.max(bounds[0], first_seen))
            end = index_temp(T.min(bounds[1], span.end))
            rows.attend(step, span, begin, end)

        rows.reset()
        if gap is None:
            first_seen = a.mask.begin(0, 1, kv_len) if a.mask.has_window else 0
            attend(Span.whole(kv_len, k_offset), first_seen)
        else:
            own = a.mask.own(0, 1, kv_len)
            gap.for_spans(kv_len, k_offset, lambda span: attend(span, span.first_seen(own)))

    def _store(self, rows: DecodeSplit, pair, is_whole, slot) -> None:
        """Store O and its lse where the pair is finished here, else a partial state."""
        a, states, slot = self.a, self.states, index_temp(slot)

        def index(head):
            return pair.sequence, pair.head * self.spec.group_size + head

        def put(head, column, values) -> None:
            with T.If(is_whole):
                with T.Then():
                    store_floats(a.o, (*index(head), column), values)
                with T.Else():
                    states.put((slot, head), column, values)

        def put_lse(head, lse) -> None:
            with T.If(is_whole):
                with T.Then():
                    T.buffer_store(a.lse, lse, list(index(head)))
                with T.Else():
                    states.put_lse((slot, head), lse)

        rows.store(put, put_lse)


def decode(spec: KernelSpec, lengths: Lengths = Lengths.WINDOWS):
    """Build the kernel `decode`; its arguments are those of `signatures.decode.decode`."""

    def attend(a: PagedInputs) -> None:
        emit_decode(spec, replace(a, mask=CausalMask(T.int32(1))))

    return signatures.decode(spec, attend, lengths)


def decode_windowed(spec: KernelSpec):
    """Build `decode` with ``length_info [3, B]``, as the stock cache passes it for windows."""
    return decode(spec, Lengths.MATRIX)


def decode_sliding(spec: KernelSpec):
    """Build the kernel `decode_sliding`; see `signatures.decode.decode_sliding`."""

    def attend(a: PagedInputs) -> None:
        emit_decode(spec, replace(a, mask=WindowMask(T.int32(1), a.window)))

    return signatures.decode_sliding(spec, attend)
