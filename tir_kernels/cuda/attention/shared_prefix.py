# SPDX-License-Identifier: Apache-2.0
"""Attention of the rows of many sequences to pages that they have in common, merged in place.

It is the skeleton of `prefill` with the rows of a tile taken from a list. As many blocks as the GPU
holds take equal splits of all tiles and positions, as in `decode`. A tile that falls into one split
is merged into O there; one that is cut leaves partial states, which a second kernel merges.
"""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import replace

from tvm.script import tirx as T

from ...semantics.rotary_mode import refuse_longrope, require_own_rotation
from ...signatures import shared
from ...signatures.inputs import SharedInputs
from ...spec import KernelSpec
from ..components.kv_rows import with_page_views
from ..emit import as_count, index_temp, launch
from ..launcher import workspace
from ..splits.tile_schedule import KvSplit, TileSchedule, balanced_splits
from ..tiles.tiling import MAX_ROWS, Tiling
from ..tiles.tiling_choice import emit_chosen
from .balanced_split_tile import SplitMask, step_of
from .shared_tile import SharedTile
from .tree_mask import NoTree

_COPY_THREADS = 128
_PACKED_ROWS = 64  # of a tile with codes of 4 bits: 128 would spill 32 bytes


@contextmanager
def _lse_before(a, slices: int):
    """The logs that are there when the call begins.

    Where several blocks sum columns of a row, one of them writes its log while others read it.
    """
    if slices == 1:
        yield a.lse
        return
    num_rows, num_heads = a.lse.shape
    with workspace(a.lse.shape, "lse_before") as before:
        with launch([num_rows], _COPY_THREADS) as ((row,), thread):
            with T.serial(-(-int(num_heads) // _COPY_THREADS)) as turn:
                head = index_temp(turn * _COPY_THREADS + thread)
                with T.If(T.And(row < num_rows, head < num_heads)), T.Then():
                    T.buffer_store(before, a.lse[row, head], [row, head])
        yield before


class SegmentSchedule(TileSchedule):
    """Splits of tiles whose items are the segments that a call is for; their rows are a list.

    Parameters
    ----------
    spec, tiling, num_blocks, lane : see `TileSchedule`
    a : the kernel's arguments `row_indptr`, `row_ids`, `page_indptr`, `first_segment` and
        `last_segment`.
    """

    def __init__(self, spec: KernelSpec, tiling: Tiling, a, num_blocks, lane):
        self.a = a
        super().__init__(spec, tiling, a.last_segment - a.first_segment, num_blocks, lane)

    def _extent(self, indptr, i):
        at = self.a.first_segment + i
        return indptr[at + 1] - indptr[at]

    def kv_len(self, i):
        """Positions of item i, whose pages are full."""
        return self._extent(self.a.page_indptr, i) * self.spec.page_size

    def first_row(self, i):
        """Return where the rows of item i begin in `row_ids`."""
        return self.a.row_indptr[self.a.first_segment + i]

    def num_rows(self, i):
        """Return the number of rows of item i."""
        return self._extent(self.a.row_indptr, i)

    def row_id(self, at):
        """Row of Q and O, of an entry of `row_ids`."""
        return self.a.row_ids[at]


def emit_shared(spec: KernelSpec, a: SharedInputs) -> None:
    """Emit the body."""
    if a.rotary_mode is not None:
        require_own_rotation(spec, a)
        refuse_longrope(spec, a)
    a = with_page_views(spec, replace(a, tree=NoTree()))

    def emit_tiles(tiling: Tiling) -> None:
        with balanced_splits(spec, a, tiling, SegmentSchedule, is_continued=True) as emit:
            with _lse_before(a, tiling.slices) as lse_before:

                def attend(split: KvSplit, v_slice, thread) -> None:
                    segment = index_temp(a.first_segment + split.tile.item)
                    offsets = a.k_rope_pos_offset
                    step = step_of(spec, a, split, v_slice, segment)
                    if offsets is not None:
                        step = replace(step, k_offset=index_temp(offsets[segment]))
                    own = replace(a, mask=SplitMask(split.first, split.last))
                    SharedTile(spec, tiling, own, step, thread, lse_before).run()

                emit(attend)

    # Of all segments of the step, with which those of the call stand for the host.
    num_rows = as_count(a.row_ids.shape[0]) * spec.group_size
    num_segments = a.row_indptr.shape[0] - 1
    is_packed = spec.codec is not None and spec.codec.bits == 4
    max_rows = _PACKED_ROWS if is_packed else MAX_ROWS
    emit_chosen(Tiling.choices(spec, spec.kv_dtype, max_rows), num_rows, num_segments, emit_tiles)


def prefill_shared(spec: KernelSpec):
    """Build the kernel `prefill_shared`; see `signatures.shared.prefill_shared`."""
    return shared.prefill_shared(spec, lambda a: emit_shared(spec, a))


def mla_prefill_shared(spec: KernelSpec):
    """Build the kernel `mla_prefill_shared`; see `signatures.shared.mla_prefill_shared`."""
    return shared.mla_prefill_shared(spec, lambda a: emit_shared(spec, a))
