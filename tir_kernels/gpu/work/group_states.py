# SPDX-License-Identifier: Apache-2.0
"""Partial states of the groups of warps of a block, in shared memory, and their merge."""

from __future__ import annotations

from tvm.script import tirx as T

from ...script import inline
from ..registers import F32, I32
from ..scores.softmax import ROW_LANES, OnlineSoftmax
from ..tiles.shared_tiles import SharedTiles
from .partial_states import LOWEST, RUN, lse_of


@T.meta_class
class GroupStates:
    """The states of a block's rows, one for each group of warps.

    Parameters
    ----------
    tiling : DecodeTiling
    memory : SharedMemory

    Attributes
    ----------
    has_rows : int32
        Whether there are any that were not stored yet; if so, of which pair:
    sequence, head : int32
    is_whole : int32
        Whether the block has all of the pair.
    slot : int32
        Of its partial state, if it has not.
    o : float32 registers
        After `merge`, a run of a row.
    lse : float32
        After `merge`, that of the row.
    """

    def __init__(self, tiling, memory):
        self.isa = memory.isa
        self.count, self.columns = tiling.kv_groups, tiling.columns
        self.tiles = SharedTiles(memory, tiling.states_begin, tiling.state, tiling.kv_groups)
        self.has_rows, self.sequence, self.head = (T.local_scalar(I32) for _ in range(3))
        self.is_whole, self.slot = T.local_scalar(I32), T.local_scalar(I32)
        self.weights = T.alloc_local((tiling.kv_groups,), F32, layout=None)
        self.o = T.alloc_local((RUN,), F32, layout=None)
        self.lse = T.local_scalar(F32)

    @inline
    def put(self, group, warp_row, softmax: OnlineSoftmax, products):
        """Keep the rows of a warp of a group, whose softmax is finished."""
        for h in T.unroll(softmax.rows):
            row = T.meta_var(warp_row + T.truncdiv(products.lane, ROW_LANES) + 8 * h)
            for n in T.unroll(softmax.output.shape[0]):
                pair = T.meta_var(products.output_pair(softmax.output, n, h))
                self.tiles.store_pair(group, row, *pair)
            if T.truncmod(products.lane, ROW_LANES) == 0:
                self.tiles.store_float(group, row, self.columns, softmax.lse[h])

    @inline
    def name(self, work, slot):
        """Note which pair the rows are of."""
        self.has_rows = 1
        self.sequence = work.sequence
        self.head = work.head
        self.is_whole = T.cast(work.is_whole(), I32)
        self.slot = slot

    @inline
    def merge(self, row, column, sink=None):
        """Merge a run of a row, from a column on, and a sink as `partial_states.sink_of` has it."""
        top = T.float32(LOWEST)
        if sink is not None:
            top = T.max(top, sink)
        for i in T.unroll(self.count):
            self.weights[i] = self.tiles.load_float(i, row, self.columns)
            top = T.max(top, self.weights[i])
        total = T.float32(0)
        if sink is not None:
            total = self.isa.exp2(sink - top)
        for i in T.unroll(self.count):
            self.weights[i] = self.isa.exp2(self.weights[i] - top)
            total += self.weights[i]
        lse, inverse = T.meta_var(lse_of(self.isa, top, total))
        self.lse = lse
        for e in T.unroll(RUN):
            self.o[e] = T.float32(0)
        for i in T.unroll(self.count):
            values = T.meta_var(self.tiles.load_floats(i, row, column, RUN))
            weight = self.weights[i] * inverse
            for e in T.unroll(RUN):
                self.o[e] += weight * values[e]
