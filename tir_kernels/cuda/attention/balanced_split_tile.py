# SPDX-License-Identifier: Apache-2.0
"""A tile of rows over a split of the positions that they see, as a `TileSchedule` cuts them."""

from __future__ import annotations

from dataclasses import dataclass, replace

from tvm.script import tirx as T

from ...semantics.visibility import CausalMask
from ...signatures.inputs import AttentionInputs
from ...spec import KernelSpec
from ..components.kv_rows import rows_of_pages
from ..emit import I32, U32, Registers, index_temp, ptx
from ..splits.tile_schedule import KvSplit
from .query_tile import SPILLED, QueryTile
from .tile_step import BalancedSplitStep

# Words for spilled fields that a step without a gap does not need.
_OWN_WORDS = range(len(SPILLED), len(SPILLED) + 2)


@dataclass(frozen=True)
class SplitMask:
    """Rows see the columns ``first .. last - 1``, a split of those of their item.

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


def step_of(
    spec: KernelSpec, a: AttentionInputs, split: KvSplit, v_slice, sequence
) -> BalancedSplitStep:
    """The step of a `BalancedSplitTile`.

    Parameters
    ----------
    spec : KernelSpec
    a : the kernel's arguments.
    split : KvSplit
    v_slice : int32 expression
        Slice of the columns of V.
    sequence : int32 expression
        Of the page table.
    """
    tile, entry = split.tile, index_temp(a.page_indptr[sequence])
    return BalancedSplitStep(
        slot=split.slot,
        is_whole=split.is_whole,
        states=split.states,
        sequence=sequence,
        rows=lambda rows_per_thread: rows_of_pages(spec, a, entry, tile.head, rows_per_thread),
        kv_len=split.kv_len,
        gap=None,
        k_offset=T.int32(0),
        length=T.int32(0),  # it matters to longrope only
        head=tile.head,
        slice=v_slice,
        first_row=tile.first_row,
        num_rows=tile.num_rows,
        first=tile.first,
    )


class BalancedSplitTile(QueryTile):
    """Per-block state for a tile and a balanced range of its positions."""

    def _spill(self) -> None:
        super()._spill()
        values = self.step.slot, self.step.is_whole
        for word, value in zip(_OWN_WORDS, values, strict=True):
            ptx("st.shared.b32", self.word_pointer(word), T.cast(value, U32))

    def _reload(self) -> BalancedSplitStep:
        step, words = super()._reload(), Registers(len(_OWN_WORDS), U32, "split")
        for i, word in enumerate(_OWN_WORDS):
            ptx("ld.shared.b32", words[i], self.word_pointer(word))
        slot, is_whole = T.cast(words[0], I32), words[1] != T.uint32(0)
        self.step = replace(step, slot=slot, is_whole=is_whole)
        return self.step

    def _state_index(self, row) -> tuple:
        return self.step.slot, row
