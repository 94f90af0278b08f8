# SPDX-License-Identifier: Apache-2.0
"""Rows that a block of a GPU computes; a thread takes one column at a time."""

from __future__ import annotations

import functools
import operator
from collections.abc import Sequence

from tvm.script import tirx as T

from ...define import ACCESS_BYTES
from ...script import opened
from ...spec import GpuTarget
from ..isa import isa_of
from ..registers import F32, WARP, temp
from .worker import THREADS, WARPS


@T.meta_class
class RowWorker:
    """The threads of a block, which share the columns of a row.

    Parameters
    ----------
    target : GpuTarget
    """

    def __init__(self, target: GpuTarget):
        self.target, self.thread, self.of_warps = target, None, None
        self.isa = isa_of(target)

    def items(self, count, size: int):
        """Launch a block for each of the items, which do not depend on each other."""
        (block,), self.thread = opened(self.isa.launch([T.cast(count, "int32")], THREADS))
        scope = self.isa.shared_scope
        self.of_warps = T.alloc_buffer((WARPS,), F32, scope=scope, align=ACCESS_BYTES)
        item = T.cast(block, "int64")
        opened(T.If(item < count))
        opened(T.Then())
        return T.serial(item, item + 1)

    def vectors(self, width: int, *bounds: int) -> Vectors:
        """Return what covers `width` columns: vectors of one lane each."""
        return Vectors(self, width)


@T.meta_class
class Vectors:
    """Columns of a row, one for each thread at a time.

    Parameters
    ----------
    worker : RowWorker
    width : int
        Number of columns.
    """

    lanes = 1

    def __init__(self, worker: RowWorker, width: int):
        self.worker, self.width, self.arithmetic = worker, width, worker.isa

    def columns(self):
        """Loop over the columns of the thread."""
        return T.serial(T.cast(self.worker.thread, "int64"), T.int64(self.width), step=THREADS)

    def load(self, buffer, index: Sequence):
        """Load the element at `index`, widened to float32."""
        return T.cast(buffer[tuple(index)], F32)

    def store(self, buffer, index: Sequence, value) -> None:
        """Round a float32 number to the buffer's type and store it at `index`."""
        T.buffer_store(buffer, T.cast(value, str(buffer.dtype)), list(index))

    def filled(self, number):
        """Return the number itself."""
        return number

    def constant(self, number: float):
        """Return a float32 constant."""
        return T.float32(number)

    def temp(self, value):
        """Keep a vector in a register, so that later uses do not repeat its expression."""
        return temp(value, self.lanes)

    def sum(self, value):
        """Return the sum of the numbers of all threads, which all of them get."""
        thread, of_warps = self.worker.thread, self.worker.of_warps
        of_warp = self.worker.isa.over_lanes(value, operator.add)
        with T.If(T.truncmod(thread, WARP) == 0), T.Then():
            T.buffer_store(of_warps, of_warp, [T.truncdiv(thread, WARP)])
        self.worker.isa.sync_block()
        total = temp(functools.reduce(operator.add, [of_warps[i] for i in range(WARPS)]))
        self.worker.isa.sync_block()  # the next sum may take the same memory
        return total
