# SPDX-License-Identifier: Apache-2.0
"""A tile of rows of many sequences over some positions that all of them see."""

from __future__ import annotations

from tvm.script import tirx as T

from ...semantics.partial_states import MergedLse, selected
from ...spec import KernelSpec
from .. import scalars
from ..elements import load_floats, store_floats, widen_words
from ..emit import F32, Registers, ptx, sync_warp
from ..tiles.tiling import Tiling
from .balanced_split_tile import BalancedSplitTile


class SharedTile(BalancedSplitTile):
    """Per-block state of a tile whose rows are those of a list.

    Rows that have seen all of a segment are merged into O and its logs.

    Parameters
    ----------
    spec, tiling, a, step, thread : see `QueryTile`
    lse_before : Buffer
        The logs that were there when the call began.
    """

    def __init__(self, spec: KernelSpec, tiling: Tiling, a, step, thread, lse_before):
        super().__init__(spec, tiling, a, step, thread)
        self.lse_before = lse_before

    def row_of_q(self, row):
        """The row of Q and O of a row of the tile."""
        return self.a.row_ids[super().row_of_q(row)]

    def _prepare(self) -> None:
        with T.If(self.step.is_whole), T.Then():
            self._merge()

    def _merge(self) -> None:
        """Weigh the rows for their sum with O, and merge their logs.

        The weights of what the rows had seen before are kept where their bounds were.
        """
        rows, lse, output = range(self.softmax.rows), self.softmax.lse, self.softmax.output
        before = Registers(len(rows), F32, "before")
        for h in rows:
            before[h] = self.lse_before[self.output_row(self.own_row(h))]
        sync_warp()  # all threads of a row have it
        for h in rows:
            merged = MergedLse(before[h], lse[h], 1, scalars)
            T.buffer_store(lse, merged.lse, [h])
            with T.unroll(output.shape[0]) as n:
                for e in range(2):
                    T.buffer_store(output, output[n, h, e] * merged.weights[1], [n, h, e])
            with T.If(T.truncmod(self.lane, 4) == 0), T.Then():
                pointer = self.bounds_pointer(self.own_row(h))
                ptx("st.shared.f32", pointer, merged.weights[0])

    def _put_chunk(self, row, index: tuple, words: Registers) -> None:
        o, count = self.a.o, self.o.layout.per_chunk
        weight, values = Registers(1, F32, "weight"), Registers(count, F32, "values")
        ptx("ld.shared.f32", weight[0], self.bounds_pointer(row))
        widen_words(words, str(o.dtype), values)
        before = load_floats(o, index, count)
        for e in range(count):
            values[e] = values[e] + selected(before[e], weight[0], 1, scalars)
        store_floats(o, index, values)
