# SPDX-License-Identifier: Apache-2.0
"""Partial states ``(o, lse)`` in a workspace, and the kernel that merges them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import contextmanager

from tvm.script import tirx as T

from ...spec import KernelSpec
from ..elements import load_floats, store_floats
from ..emit import F32, WARP, Registers, index_temp
from ..launcher import workspace
from ..scalars import exp2, log2, temp
from ..warp import shuffle_xor

LOWEST = -3.0e38  # finite, so that `-inf - top` is not NaN
RUN = 8  # elements that a thread takes at once
MERGED_ROWS = 4  # of a block that merges: a warp for each
MIN_BLOCKS_OF_MERGE = 4  # of these on a multiprocessor: 128 registers


def weigh(logs: Registers):
    """Turn the lse of partial states into their weights; returns the merged lse."""
    top, total = Registers(1, F32, "top"), Registers(1, F32, "total")
    top[0] = T.float32(LOWEST)
    for i in range(logs.count):
        top[0] = T.max(top[0], logs[i])
    total[0] = T.float32(0)
    for i in range(logs.count):
        logs[i] = exp2(logs[i] - top[0])
        total[0] = total[0] + logs[i]
    lse, inverse = lse_of(top[0], total[0])
    for i in range(logs.count):
        logs[i] = logs[i] * inverse
    return lse


def lse_of(top, total):
    """The lse of a maximum and the sum of exponentials relative to it, and the inverse of the sum.

    Both are NaN where the sum is: the maximum of NaN and a number is the number.
    """
    is_empty = total <= T.float32(0.5)  # the exponential of the maximum itself is 1
    empty = T.reinterpret(F32, T.uint32(0xFF800000))
    lse = temp(T.if_then_else(is_empty, empty, top + log2(total)))
    return lse, temp(T.if_then_else(is_empty, T.float32(0), T.float32(1) / total))


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
        self.spec, self.is_continued = spec, is_continued
        # The lse comes behind the row, and what keeps the rows aligned.
        self.shape = (*counts, spec.v_head_dim + RUN)
        self.buffer = None

    @contextmanager
    def allocated(self):
        """Launches within may use them."""
        with workspace(self.shape, "partial_states") as self.buffer:
            yield

    def put(self, index: tuple, column, values: Registers) -> None:
        """Keep elements of the row of a state."""
        store_floats(self.buffer, (*index, column), values)

    def put_lse(self, index: tuple, lse) -> None:
        """Keep the lse of the row of a state."""
        T.buffer_store(self.buffer, lse, [*index, self.spec.v_head_dim])

    def merge(self, a, index_of: Callable, count, output: tuple, lane) -> None:
        """Merge `count` states into a row of O and its logs, by a warp.

        Parameters
        ----------
        a : the kernel's arguments `o` and `lse`.
        index_of : callable
            Number of a state -> its index.
        output : tuple of int32 expressions
            Index of the row.
        """
        width = self.spec.v_head_dim

        def lse_at(i):
            return self.buffer[(*index_of(i), width)]

        top, total = Registers(1, F32, "top"), Registers(1, F32, "total")
        top[0], total[0] = T.float32(LOWEST), T.float32(0)
        if self.is_continued:
            lse_before = temp(a.lse[output])
            top[0] = T.max(top[0], lse_before)

        def for_own(body):
            with T.serial(T.ceildiv(count, WARP)) as turn:
                i = index_temp(turn * WARP + lane)
                with T.If(i < count), T.Then():
                    body(i)

        def raise_top(i):
            top[0] = T.max(top[0], lse_at(i))

        def add(i):
            total[0] = total[0] + exp2(lse_at(i) - top[0])

        for_own(raise_top)
        for mask in (1, 2, 4, 8, 16):
            top[0] = T.max(top[0], shuffle_xor(top[0], mask))
        for_own(add)
        for mask in (1, 2, 4, 8, 16):
            total[0] = total[0] + shuffle_xor(total[0], mask)
        if self.is_continued:
            before = temp(exp2(lse_before - top[0]))
            total[0] = total[0] + before
        lse, inverse = lse_of(top[0], total[0])
        with T.If(lane == 0), T.Then():
            T.buffer_store(a.lse, lse, list(output))
        sums = Registers(RUN, F32, "sums")
        with T.serial(-(-width // (RUN * WARP))) as turn:
            column = index_temp((turn * WARP + lane) * RUN)
            with T.If(column < width), T.Then():
                sums.fill(T.float32(0))
                if self.is_continued:
                    o = load_floats(a.o, (*output, column), RUN)
                    weight = temp(before * inverse)
                    for e in range(RUN):  # an o of nothing seen may hold anything
                        sums[e] = T.Select(lse_before < LOWEST, T.float32(0), o[e] * weight)
                with T.serial(count) as i:
                    weight = temp(exp2(lse_at(i) - top[0]) * inverse)
                    state = load_floats(self.buffer, (*index_of(i), column), RUN)
                    for e in range(RUN):
                        sums[e] = sums[e] + weight * state[e]
                store_floats(a.o, (*output, column), sums)
