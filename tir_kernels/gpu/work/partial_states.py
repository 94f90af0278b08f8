# SPDX-License-Identifier: Apache-2.0
"""Partial states ``(o, lse)`` and their merge: of blocks, and of groups of warps in a block.

Those of blocks lie in a workspace in global memory, those of groups in shared memory.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from contextlib import contextmanager

from tvm.script import tirx as T

from ...script import inline
from ...spec import LOG2E, KernelSpec
from ..isa import isa_of
from ..registers import F32, I32, WARP, Registers, temp
from ..scores.softmax import ROW_LANES
from ..tiles.shared_tiles import SharedTiles

LOWEST = -3.0e38  # finite, so that `-inf - top` is not NaN
MINUS_INFINITY = 0xFF800000  # the bits
RUN = 8  # elements that a thread takes at once
MERGED_AT_ONCE = 8  # states whose loads do not wait for each other
MERGED_ROWS = 4  # of a block that merges: a warp for each
# Threads of such a block, and blocks of a multiprocessor: 128 registers; as `emit.launch` takes it.
MERGE_BLOCK_SIZE = MERGED_ROWS * WARP, 4


def lse_of(isa, top, total):
    """The lse of a maximum and the sum of exponentials relative to it, and the inverse of the sum.

    Both are NaN where the sum is: the maximum of NaN and a number is the number.
    """
    is_empty = total <= T.float32(0.5)  # the exponential of the maximum itself is 1
    empty = T.reinterpret(F32, T.uint32(MINUS_INFINITY))
    lse = temp(T.if_then_else(is_empty, empty, top + isa.log2(total)))
    return lse, temp(T.if_then_else(is_empty, T.float32(0), T.float32(1) / total))


def sink_of(a, output: tuple, is_whole=True):
    """The sink logit of a row of O, in the exp2 domain; None in kernels without sinks.

    It is -inf, none, where the row is a partial state: the merge lets the sink in.
    """
    if a.sink_logits is None:
        return None
    none = T.reinterpret(F32, T.uint32(MINUS_INFINITY))
    return temp(T.if_then_else(is_whole, a.sink_logits[output[-1]] * T.float32(LOG2E), none))


def _nothing(isa, sink) -> tuple:
    """The lse and the elements of a row that has seen nothing but a sink, if there is one."""
    if sink is None:
        return T.reinterpret(F32, T.uint32(MINUS_INFINITY)), T.float32(0)
    top = temp(T.max(T.float32(LOWEST), sink))
    lse, inverse = lse_of(isa, top, temp(isa.exp2(sink - top)))
    # NaN with a sink that is NaN or +inf.
    return lse, temp(T.Select(inverse >= T.float32(0), T.float32(0), inverse))


@T.meta_class
class PartialStates:
    """Room for states of rows, in global memory.

    Parameters
    ----------
    spec : KernelSpec
    counts : sequence of int32 expressions
        How many there are, of any number of dimensions.
    is_continued : bool
        The outputs hold another partial state of their rows, to be merged with.
    """

    def __init__(self, spec: KernelSpec, counts: Sequence, is_continued: bool = False):
        self.isa = isa_of(spec.target)
        self.spec, self.is_continued, self.width = spec, is_continued, spec.v_head_dim
        # The lse follows the row, with what keeps the rows aligned.
        self.shape = (*counts, spec.v_head_dim + RUN)
        self.buffer = None

    @contextmanager
    def allocated(self):
        """Launches within may use them."""
        with self.isa.workspace(self.shape, "partial_states") as self.buffer:
            yield

    def put(self, index: tuple, column, values) -> None:
        """Keep elements of the row of a state."""
        self.isa.store_floats(self.buffer, (*index, column), values)

    def put_lse(self, index: tuple, lse) -> None:
        """Keep the lse of the row of a state."""
        T.buffer_store(self.buffer, lse, [*index, self.width])

    def lse(self, index: tuple):
        """Return the lse of the row of a state."""
        return self.buffer[(*index, self.width)]

    @inline
    def merge(self, a, index_of: Callable, count, output: tuple, lane):
        """Merge `count` states into a row of O and its logs, by a warp.

        Parameters
        ----------
        a : the kernel's arguments `o` and `lse`, and `sink_logits` if there are any.
        index_of : callable
            Number of a state -> its index.
        output : tuple of int32 expressions
            Index of the row.
        """
        lse_before = T.meta_var(temp(a.lse[output]) if self.is_continued else None)
        sink = T.meta_var(sink_of(a, output))
        top = T.float32(LOWEST)
        total = T.float32(0)
        for turn in T.serial(T.ceildiv(count, WARP)):
            i = turn * WARP + lane
            if i < count:
                lse = self.lse(index_of(i))
                new_top = T.max(top, lse)
                total = total * self.isa.exp2(top - new_top) + self.isa.exp2(lse - new_top)
                top = new_top
        merged_top = self.isa.over_lanes(top, T.max)
        if self.is_continued:
            merged_top = T.max(merged_top, lse_before)
        if a.sink_logits is not None:
            merged_top = T.max(merged_top, sink)
        total = self.isa.over_lanes(total * self.isa.exp2(top - merged_top), operator.add)
        before = T.meta_var(
            temp(self.isa.exp2(lse_before - merged_top)) if self.is_continued else None
        )
        if self.is_continued:
            total += before
        if a.sink_logits is not None:
            total += self.isa.exp2(sink - merged_top)
        merged, inverse = T.meta_var(lse_of(self.isa, merged_top, total))
        if lane == 0:
            a.lse[output] = merged
        sums = T.meta_var(Registers(RUN, F32, "sums"))
        states = T.alloc_local((MERGED_AT_ONCE, RUN), F32, layout=None)
        weights = T.alloc_local((MERGED_AT_ONCE,), F32, layout=None)
        for turn in T.serial(-(-self.width // (RUN * WARP))):
            column = (turn * WARP + lane) * RUN
            if column < self.width:
                sums.fill(T.float32(0))
                if self.is_continued:
                    o = T.meta_var(self.isa.load_floats(a.o, (*output, column), RUN))
                    for e in T.unroll(RUN):  # an o of nothing seen may hold anything
                        term = T.meta_var(o[e] * (before * inverse))
                        sums.buffer[e] = T.Select(lse_before < LOWEST, T.float32(0), term)
                for batch in T.serial(T.ceildiv(count, MERGED_AT_ONCE)):
                    for j in T.unroll(MERGED_AT_ONCE):
                        index = T.meta_var(index_of(T.min(batch * MERGED_AT_ONCE + j, count - 1)))
                        loaded = T.meta_var(
                            self.isa.load_floats(self.buffer, (*index, column), RUN)
                        )
                        weights[j] = self.lse(index)
                        for e in T.unroll(RUN):
                            states[j, e] = loaded[e]
                    for j in T.unroll(MERGED_AT_ONCE):
                        weight = self.isa.exp2(weights[j] - merged_top) * inverse
                        if batch * MERGED_AT_ONCE + j < count:
                            for e in T.unroll(RUN):
                                sums.buffer[e] += weight * states[j, e]
                self.isa.store_floats(a.o, (*output, column), sums)

    @inline
    def clear(self, a, output: tuple, lane):
        """Clear a row of O that has seen nothing, by a warp."""
        zeros = T.meta_var(Registers(RUN, F32, "zeros"))
        lse, value = T.meta_var(_nothing(self.isa, sink_of(a, output)))
        zeros.fill(value)
        if lane == 0:
            a.lse[output] = lse
        for turn in T.serial(-(-self.width // (RUN * WARP))):
            column = (turn * WARP + lane) * RUN
            if column < self.width:
                self.isa.store_floats(a.o, (*output, column), zeros)


@T.meta_class
class BlockStates(PartialStates):
    """Room for two states of each block: of what its first and its last KV tile belong to.

    Parameters
    ----------
    spec : KernelSpec
    num_blocks : int32 expression
        That share the KV tiles.
    num_rows : int, optional
        Of a state; None: the query heads of a KV head.
    is_continued : bool
        As `PartialStates` takes it.
    """

    def __init__(
        self, spec: KernelSpec, num_blocks, num_rows: int | None = None, is_continued: bool = False
    ):
        self.num_blocks, self.num_rows = num_blocks, num_rows or spec.group_size
        super().__init__(spec, (2 * num_blocks, self.num_rows), is_continued)

    def slot(self, block, is_first):
        """Return the slot of the state that the block before began, or that the next one ends."""
        return block * 2 + T.if_then_else(is_first, 0, 1)


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
        Whether there are any that were not stored yet.
    sequence, head : int32
        The KV head that they are of.
    is_whole : int32
        Whether the block has all of its positions.
    slot : int32
        Of its partial state, if it has not.
    o : float32 registers
        After `merge`, a run of a row.
    lse : float32
        After `merge`, that of the row.
    """

    def __init__(self, tiling, memory):
        self.isa = memory.isa
        self.tiling, self.count, self.columns = tiling, tiling.kv_groups, tiling.columns
        self.tiles = SharedTiles(memory, tiling.states_begin, tiling.state, tiling.kv_groups)
        self.has_rows, self.sequence, self.head = (T.local_scalar(I32) for _ in range(3))
        self.is_whole, self.slot = T.local_scalar(I32), T.local_scalar(I32)
        self.weights = T.alloc_local((tiling.kv_groups,), F32, layout=None)
        self.o = T.alloc_local((RUN,), F32, layout=None)
        self.lse = T.local_scalar(F32)

    @inline
    def put(self, group, warp_row, o, lse, products):
        """Keep the rows of O of a warp of a group, and their logs."""
        for h in T.unroll(o.shape[1]):
            row = T.meta_var(warp_row + T.truncdiv(products.lane, ROW_LANES) + 8 * h)
            for n in T.unroll(o.shape[0]):
                pair = T.meta_var(products.output_pair(o, n, h))
                self.tiles.store_pair(group, row, *pair)
            if T.truncmod(products.lane, ROW_LANES) == 0:
                self.tiles.store_float(group, row, self.columns, lse[h])

    @inline
    def name(self, work, slot):
        """Note which KV head the rows are of."""
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

    @inline
    def store(self, a, states: BlockStates, first_row, first_column, thread):
        """Store the merged rows: to O if the block has all of the KV head, or to its state.

        Parameters
        ----------
        a : the kernel's arguments `o` and `lse`, and `sink_logits` if there are any.
        states : BlockStates
        first_row, first_column : int32 expressions
            Of the block's slice of query heads, and of V.
        thread : int32 expression
        """
        num_runs = T.meta_var(self.tiling.rows * self.columns // RUN)
        group_size = T.meta_var(states.spec.group_size)
        for turn in T.serial(T.ceildiv(num_runs, self.tiling.num_threads)):
            run = turn * self.tiling.num_threads + thread
            row = T.truncdiv(run, self.columns // RUN)
            column = T.truncmod(run, self.columns // RUN) * RUN
            head = first_row + row
            v_column = first_column + column
            if row < self.tiling.rows and head < group_size and v_column < states.width:
                o_row = T.meta_var((self.sequence, self.head * group_size + head))
                sink = T.meta_var(sink_of(a, o_row, self.is_whole != 0))
                self.merge(row, column, sink)
                if self.is_whole != 0:
                    self.isa.store_floats(a.o, (*o_row, v_column), Registers.of(self.o))
                    if v_column == 0:
                        a.lse[o_row] = self.lse
                else:
                    state = T.meta_var((self.slot, head))
                    states.put(state, v_column, Registers.of(self.o))
                    if v_column == 0:
                        states.put_lse(state, self.lse)
