# SPDX-License-Identifier: Apache-2.0
"""Attention of the rows of many sequences to pages that they have in common, merged in place.

A tile is some rows of a segment, whatever sequences they belong to, with the query heads of one KV
head: K and V are packed once for all of them, as in `prefill`. The positions of a tile are cut as
well, as in `mla`, so that one segment and one KV head use every thread.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace

from tvm.script import tirx as T

from ....semantics.rotary_mode import refuse_longrope
from ....signatures import shared
from ....signatures.inputs import AttentionInputs, SharedInputs
from ....spec import KernelSpec
from ...components.inline_rope import InlineRope
from ...components.kv_operands import operands
from ...components.kv_rows import LatentRows, PagedRows
from ...components.output import Output
from ...components.query_tile import Tiling
from ...components.work import cut
from ...simd import Register, index_temp, wide_temp
from ..define import build
from ..rotation import rotation_of
from .split_tiles import CutTile, TileWork, emit_cut_tiles
from .tile import SharedTile
from .tiling import POSITIONS, SharedStep


@dataclass(frozen=True, kw_only=True)
class _SegmentTile(CutTile):
    """Tokens of a segment with the query heads of one KV head.

    Parameters
    ----------
    segment, head : int32 expressions
    first_token : int32 expression
        Its entry in `row_ids`.
    kv_len : int32 expression
        Positions of the segment.
    """

    segment: object
    head: object
    first_token: object
    kv_len: object


def _for_tiles(spec: KernelSpec, a: AttentionInputs, body):
    """Emit ``body(tile)`` for every tile of the segments; returns the cost of all."""
    max_tokens = Tiling.of(spec).tokens
    before = Register(1, "int64", T.int64(0))
    with T.serial(a.last_segment - a.first_segment) as i:
        segment = index_temp(a.first_segment + i)
        begin, end = (index_temp(a.row_indptr[segment + n]) for n in range(2))
        num_pages = a.page_indptr[segment + 1] - a.page_indptr[segment]
        kv_len = index_temp(num_pages * spec.page_size)
        num_blocks = index_temp((kv_len + POSITIONS - 1) // POSITIONS)
        # Tiles of like size: a small last one would pack K and V for few rows.
        num_tiles = index_temp((end - begin + max_tokens - 1) // max_tokens)
        with T.serial(spec.num_kv_heads) as head, T.serial(num_tiles) as tile:
            first_token = index_temp(begin + cut(end - begin, tile, num_tiles))
            num_tokens = index_temp(begin + cut(end - begin, tile + 1, num_tiles) - first_token)
            cost = wide_temp(T.cast(num_blocks, "int64") * num_tokens)
            body(
                _SegmentTile(
                    segment=segment,
                    head=head,
                    first_token=first_token,
                    num_tokens=num_tokens,
                    kv_len=kv_len,
                    before=wide_temp(before.get()),
                    cost=cost,
                )
            )
            before.set(before.get() + cost)
    return wide_temp(before.get())


class _Rotation(InlineRope):
    """The rotation of K by its position in a segment."""

    def __init__(self, spec: KernelSpec, a: AttentionInputs):
        super().__init__(spec, a)
        self.first_positions = a.k_rope_pos_offset
        refuse_longrope(spec, a)

    def first_position(self, segment):
        """The position of a segment's first slot."""
        return index_temp(self.first_positions[segment])


class _SharedPrefixTile(SharedTile):
    """The rows of a tile over some of the positions of the segment."""

    def run_blocks(
        self, a: AttentionInputs, tile: _SegmentTile, rows: PagedRows, begin, end
    ) -> None:
        """Attend to the blocks of positions ``begin .. end - 1``, from a cleared state."""
        group = self.spec.group_size

        def row_of(row):
            token = index_temp(a.row_ids[tile.first_token + row // group])
            return token, index_temp(tile.head * group + row % group)

        step = SharedStep(
            num_rows=index_temp(tile.num_tokens * group),
            row_of=row_of,
            kv_len=tile.kv_len,
            begin=begin,
            end=end,
            k_offset=a.rope.first_position(tile.segment),
        )
        self.run(a, rows, step)


def emit_shared(spec: KernelSpec, ops, a: AttentionInputs) -> None:
    """Emit the body for inputs with a `rope`."""
    kind = LatentRows if spec.kind == "mla" else PagedRows

    def begin_task():
        worker = _SharedPrefixTile(spec, ops, Tiling.of(spec).tokens * spec.group_size)
        a.rope.begin_task()
        a.rope.begin_sequence(T.int32(0))  # the length matters to longrope only
        return worker

    def rows_of(tile):
        first = index_temp(a.page_indptr[tile.segment])
        last = index_temp(a.page_indptr[tile.segment + 1] - 1)
        return kind(spec, a.pages, a.page_values, first, last, head=tile.head)

    def at(tile, row):
        group = spec.group_size
        token = index_temp(a.row_ids[tile.first_token + row // group])
        return token, index_temp(tile.head * group + row % group)

    tiles = TileWork(
        group=spec.group_size,
        positions=POSITIONS,
        for_tiles=functools.partial(_for_tiles, spec, a),
        begin_task=begin_task,
        rows_of=rows_of,
        at=at,
        output=lambda: Output(spec, a.o, a.lse, merges=True),
    )
    emit_cut_tiles(spec, ops, a, tiles)


def prefill_shared(spec: KernelSpec):
    """Build the kernel `prefill_shared`; see `signatures.shared.prefill_shared`."""

    def attend(a: SharedInputs) -> None:
        a = replace(a, rope=rotation_of(spec, a, _Rotation))
        emit_shared(spec, operands(spec, spec.kv_dtype), a)

    return build(spec, shared.prefill_shared, attend)


def mla_prefill_shared(spec: KernelSpec):
    """Build the kernel `mla_prefill_shared`; see `signatures.shared.mla_prefill_shared`."""

    def attend(a: SharedInputs) -> None:
        a = replace(a, rope=rotation_of(spec, a))
        emit_shared(spec, operands(spec, spec.kv_dtype), a)

    return build(spec, shared.mla_prefill_shared, attend)
