# SPDX-License-Identifier: Apache-2.0
"""Attention of the rows of many sequences to pages that they have in common, merged in place.

It is the skeleton of `prefill` with the rows of a tile taken from a list. As many blocks as the GPU
holds take equal shares of all tiles and positions, as in `decode`. A tile that falls into one share
is merged into O there; one that is cut leaves states, which a second kernel merges.
"""

from __future__ import annotations

from contextlib import contextmanager
from types import SimpleNamespace

from tvm.script import tirx as T

from ..cpu.inline_rope import require_own_rotation
from ..cpu.shared_prefix import MLA_PREFILL_SHARED, PREFILL_SHARED, refuse_longrope
from ..spec import KernelSpec
from .arguments import attention_kernel
from .columns import PlainColumns
from .emit import WARP, Variable, index_temp, launch, opaque, sync_block
from .launcher import resident_blocks, workspace
from .partials import Partials
from .rows import rows_of_pages
from .shared_unit import PartMask, SharedUnit
from .tile_split import TileSplit
from .tiling import Tiling

_COPY_THREADS = 128


@contextmanager
def _lse_before(a, slices: int):
    """The logs that are there when the call begins.

    Where blocks share out the columns of a row, one of them writes its log while others read it.
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


def emit_shared(spec: KernelSpec, a: SimpleNamespace) -> None:
    """Emit the body: `a` holds the matched arguments by their names."""
    if hasattr(a, "rotary_mode"):
        require_own_rotation(spec, a)
        refuse_longrope(spec, a)
    a.columns = PlainColumns()
    tiling = Tiling.of(spec, spec.kv_dtype)
    num_blocks = resident_blocks(tiling.num_bytes, tiling.min_blocks, tiling.slices)
    partials = Partials(spec, num_blocks, tiling.rows, goes_on=True)

    def split_of(lane) -> TileSplit:
        return TileSplit(spec, tiling, a, num_blocks, lane)

    def attend_to_share(block, part, thread, lse_before) -> None:
        lane = index_temp(T.truncmod(thread, WARP))
        split = split_of(lane)
        current = Variable(block * split.share)
        last = index_temp(T.min(current.get() + split.share, split.total))
        with T.If(current.get() < last), T.Then():
            owner = split.owner(current.get(), lane)
            segment, index = Variable(owner.sequence), Variable(owner.index)
            with T.While(current.get() < last):
                with T.While(index.get() >= split.units_of(segment.get())):
                    index.set(index.get() - split.units_of(segment.get()))
                    segment.set(segment.get() + 1)
                here = SimpleNamespace(sequence=segment.get(), index=index.get())
                tile = split.pair(here, current.get())
                first = index_temp(current.get())
                current.set(T.min(tile.end, last))
                index.set(index.get() + current.get() - first)
                kv_len = index_temp(split.kv_len(segment.get()))
                bounds = [
                    index_temp((at - tile.begin) * tiling.positions)
                    for at in (first, current.get())
                ]
                a.mask = PartMask(bounds[0], index_temp(T.min(bounds[1], kv_len)))
                is_whole = T.And(first == tile.begin, current.get() == tile.end)
                slot = partials.slot(block, first > tile.begin)
                sync_block()  # none reads any more what the tile before left in shared memory
                step = _step(tile, kv_len, part)
                step.partials, step.slot, step.lse_before = partials, index_temp(slot), lse_before
                step.is_whole = is_whole
                # Or all that depends on the thread only is kept in registers from tile to tile.
                SharedUnit(spec, tiling, a, step, opaque(thread)).run()

    def _step(tile, kv_len, part) -> SimpleNamespace:
        entry = index_temp(a.page_indptr[tile.segment])
        offsets = getattr(a, "k_rope_pos_offset", None)
        return SimpleNamespace(
            sequence=tile.segment,
            rows=lambda rows_per_thread: rows_of_pages(spec, a, entry, tile.head, rows_per_thread),
            kv_len=kv_len,
            gap=None,
            k_offset=T.int32(0) if offsets is None else index_temp(offsets[tile.segment]),
            length=T.int32(0),  # it matters to longrope only
            head=tile.head,
            slice=part,
            first_row=tile.first_row,
            num_rows=tile.num_rows,
            first=tile.first,
        )

    with partials.allocated(), _lse_before(a, tiling.slices) as lse_before:
        grid = [num_blocks, tiling.slices]
        with launch(grid, tiling.num_threads, tiling.min_blocks) as ((block, part), thread):
            attend_to_share(block, part, thread, lse_before)
        partials.launch_merge(a, split_of, lambda: None)


def prefill_shared(spec: KernelSpec):
    """Build the kernel `prefill_shared`; its arguments are those of the CPU's."""
    return attention_kernel(spec, PREFILL_SHARED, lambda a: emit_shared(spec, a))


def mla_prefill_shared(spec: KernelSpec):
    """Build the kernel `mla_prefill_shared`; its arguments are those of the CPU's."""
    return attention_kernel(spec, MLA_PREFILL_SHARED, lambda a: emit_shared(spec, a))
