# SPDX-License-Identifier: Apache-2.0
"""The output of a tile: its rows of O and their logs, or partial states that are merged later."""

from __future__ import annotations

from tvm.script import tirx as T

from ...script import inline
from ...semantics.softmax import MergedLse, selected
from ...spec import KernelSpec
from ..isa import isa_of
from ..registers import F32, U32, Registers
from ..scores.block_memory import BlockMemory
from ..scores.query_rows import QueryRows
from ..tiles.shared_tiles import SharedTiles
from ..tiles.tiling import Tiling
from .partial_states import PartialStates


@T.meta_class
class TileOutput:
    """Stores finished rows and their logs.

    Parameters
    ----------
    spec : KernelSpec
    tiling : Tiling
    a : the kernel's arguments `o` and `lse`.
    rows : QueryRows
    states : PartialStates
        Where rows go that other blocks see more columns of.
    tiles : SharedTiles
        Room for the tile of O.
    """

    def __init__(
        self,
        spec: KernelSpec,
        tiling: Tiling,
        a,
        rows: QueryRows,
        states: PartialStates,
        tiles: SharedTiles,
    ):
        self.isa = isa_of(spec.target)
        self.tiling, self.o, self.lse, self.rows = tiling, a.o, a.lse, rows
        self.work, self.states, self.tiles = rows.work, states, tiles
        # The first columns of the block, and of the warp.
        self.width, self.block_begin = spec.v_head_dim, self.work.slice * tiling.columns

    @property
    def v_begin(self):
        """Return the first column that the warp sums."""
        return self.block_begin + self.rows.v_begin

    @property
    def num_chunks(self):
        """Return the chunks of a row of O that the block has."""
        per_chunk = self.tiling.o.per_chunk
        if self.tiling.slices == 1:
            return self.width // per_chunk
        return T.min(self.tiling.o.chunks, T.truncdiv(self.width - self.block_begin, per_chunk))

    @inline
    def prepare(self, o, lse):
        """Change finished rows and their logs before they are stored."""

    @inline
    def store_lse(self, lse, thread):
        """Store the logs of the rows; where other blocks see more, with their states."""
        self.rows.begin(thread)
        is_first = T.meta_var(T.And(T.truncmod(self.rows.lane, 4) == 0, self.v_begin == 0))
        for h in T.unroll(self.rows.count):
            row = T.meta_var(self.rows.own(h))
            if T.And(is_first, self.rows.exists(row)):
                if self.work.is_whole:
                    T.buffer_store(self.lse, lse[h], list(self.rows.index(row)))
                else:
                    self.states.put_lse(self.work.state_index(self.rows, row), lse[h])

    @inline
    def store_rows(self, o, thread):
        """Store the rows; where other blocks see more, as states."""
        self.rows.begin(thread)
        if self.work.is_whole:
            self._store_rows_of_o(o)
        else:
            self._store_states(o)

    @inline
    def _store_states(self, o):
        column = T.meta_var(self.v_begin + T.truncmod(self.rows.lane, 4) * 2)
        for h in T.unroll(self.rows.count):
            row = T.meta_var(self.rows.own(h))
            index = T.meta_var(self.work.state_index(self.rows, row))
            if self.rows.exists(row):
                for n in T.unroll(o.shape[0]):
                    if self.v_begin + n * 8 < self.width:
                        self._put_state(index, column + n * 8, [o[n, h, e] for e in range(2)])

    def _put_state(self, index: tuple, column, pair: list) -> None:
        values = Registers(2, F32, "pair")
        for e in range(2):
            values[e] = pair[e]
        self.states.put(index, column, values)

    @inline
    def _store_rows_of_o(self, o):
        """Write the rows of O, through shared memory."""
        column = T.meta_var(self.rows.v_begin + T.truncmod(self.rows.lane, 4) * 2)
        for n in T.unroll(o.shape[0]):
            for h in T.unroll(self.rows.count):
                pair = T.meta_var([o[n, h, e] for e in range(2)])
                self.tiles.store_pair(0, self.rows.own(h), n * 8 + column, *pair)
        self.isa.sync_block()
        words = T.alloc_local((4,), U32, layout=None)
        num_chunks = T.meta_var(self.tiles.layout.chunks)
        # From the thread on, or compilers unroll the loop, for which there are no registers.
        num_items = T.meta_var(self.tiling.rows * num_chunks)
        for item in T.serial(self.rows.thread, num_items, step=self.tiling.num_threads):
            row = T.truncdiv(item, num_chunks)
            chunk = T.truncmod(item, num_chunks)
            if T.And(self.rows.exists(row), chunk < self.num_chunks):
                taken = T.meta_var([words[i] for i in range(4)])
                self.tiles.memory.load(taken, self.tiles.place(0, row, chunk))
                first = T.meta_var(self.block_begin + chunk * self.tiles.layout.per_chunk)
                self._store_chunk(row, (*self.rows.index(row), first), words)

    def _store_chunk(self, row, index: tuple, words) -> None:
        """Store 16 bytes of a row of O, from `index` on."""
        self.isa.store_words(words, self.o, index, 16)


class MergedOutput(TileOutput):
    """Merges the rows that have seen all of a segment into O and its logs.

    Parameters
    ----------
    lse_before : Buffer
        The logs that were there when the call began.
    memory : BlockMemory
    arguments : see `TileOutput`
    """

    def __init__(self, lse_before, memory: BlockMemory, *arguments):
        super().__init__(*arguments)
        self.lse_before, self.memory = lse_before, memory

    @inline
    def prepare(self, o, lse):
        """Weigh the rows for their sum with O, and make their logs the merged ones.

        The weights of what the rows had seen before are kept where their bounds were.
        """
        if self.work.is_whole:
            before = T.alloc_local((self.rows.count,), F32, layout=None)
            for h in T.unroll(self.rows.count):
                before[h] = self.lse_before[self.rows.index(self.rows.own(h))]
            if self.tiling.warp_slices > 1:
                self.isa.sync_block()  # all warps of a row have it
            else:
                self.isa.sync_warp()  # all threads of a row have it
            for h in T.unroll(self.rows.count):
                merged = T.meta_var(MergedLse(before[h], lse[h], 1, self.isa))
                lse[h] = merged.lse
                for n in T.unroll(o.shape[0]):
                    for e in T.unroll(2):
                        o[n, h, e] *= merged.weights[1]
                is_first = T.meta_var(T.truncmod(self.rows.lane, 4) + self.rows.v_begin == 0)
                if is_first:
                    place = T.meta_var(self.memory.bounds(self.rows.own(h)))
                    self.memory.shared.store(place, merged.weights[0])

    def _store_chunk(self, row, index: tuple, words) -> None:
        count = self.tiles.layout.per_chunk
        weight, values, taken = (
            Registers(n, dtype, name)
            for n, dtype, name in ((1, F32, "weight"), (count, F32, "values"), (4, U32, "taken"))
        )
        self.memory.shared.load([*weight], self.memory.bounds(row))
        for i in range(4):
            taken[i] = words[i]
        self.isa.widen_words(taken, str(self.o.dtype), values)
        before = self.isa.load_floats(self.o, index, count)
        for e in range(count):
            values[e] = values[e] + selected(before[e], weight[0], 1, self.isa)
        self.isa.store_floats(self.o, index, values)


def tile_output(lse_before, memory: BlockMemory, *arguments) -> TileOutput:
    """Make a `MergedOutput` if there is something to merge with, else a `TileOutput`."""
    if lse_before is None:
        return TileOutput(*arguments)
    return MergedOutput(lse_before, memory, *arguments)
