# SPDX-License-Identifier: Apache-2.0
"""A tile of rows over a part of the positions that they see: what a block of a `TileSplit` does."""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace

from tvm.script import tirx as T

from ..masks import CausalMask
from ..spec import KernelSpec
from .emit import F32, Registers, index_temp
from .prefill_unit import Unit
from .rows import rows_of_pages


@dataclass(frozen=True)
class PartMask:
    """Rows see the columns ``first .. last - 1``, a part of those of their item.

    Parameters
    ----------
    first, last : int32 expressions
    whole : CausalMask, optional
        What they see of all columns, from the first one on; None: all.
    """

    first: object
    last: object
    whole: CausalMask | None = None
    has_window = True

    def begin(self, row, num_rows, kv_len):
        """First column that a row sees."""
        return self.first

    def end(self, row, num_rows, kv_len):
        """First column behind these."""
        if self.whole is None:
            return self.last
        return T.min(self.whole.end(row, num_rows, kv_len), self.last)


def step_of(spec: KernelSpec, a: SimpleNamespace, part, piece, sequence) -> SimpleNamespace:
    """What a `PartUnit` is told of its part: its `step`.

    Parameters
    ----------
    spec : KernelSpec
    a : the kernel's arguments.
    part : as `tile_split.shared_out` tells it.
    piece : int32 expression
        Slice of the columns of V.
    sequence : int32 expression
        Of the page table.
    """
    tile, entry = part.tile, index_temp(a.page_indptr[sequence])
    return SimpleNamespace(
        part=part,
        sequence=sequence,
        rows=lambda rows_per_thread: rows_of_pages(spec, a, entry, tile.head, rows_per_thread),
        kv_len=part.kv_len,
        gap=None,
        k_offset=T.int32(0),
        length=T.int32(0),  # it matters to longrope only
        head=tile.head,
        slice=piece,
        first_row=tile.first_row,
        num_rows=tile.num_rows,
        first=tile.first,
    )


class PartUnit(Unit):
    """What a block keeps for a part of a tile.

    Where the part is the whole, the rows are written; else their states are kept for the merge.
    """

    def _put(self, lse: Registers) -> None:
        with T.If(self.step.part.is_whole):
            with T.Then():
                self._put_whole(lse)
            with T.Else():
                self._keep(lse)

    def _put_whole(self, lse: Registers) -> None:
        super()._put(lse)

    def _keep(self, lse: Registers) -> None:
        """Keep the state of all rows for those that go on with them."""
        part, width, output = self.step.part, self.spec.v_head_dim, self.softmax.output
        pair = Registers(2, F32, "pair")
        quad = T.truncmod(self.lane, 4)
        for h in range(output.rows):
            row = self.own_row(h)
            with T.unroll(output.num_tiles) as n:
                with T.If(self.v_begin + n * 8 < width), T.Then():
                    for e in range(2):
                        pair[e] = output[n, h, e]
                    part.partials.put(part.slot, row, self.v_begin + n * 8 + quad * 2, pair)
            with T.If(T.And(quad == 0, self.step.slice == 0)), T.Then():
                part.partials.put_lse(part.slot, row, lse[h])
