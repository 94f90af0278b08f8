# SPDX-License-Identifier: Apache-2.0
"""Rows that a thread of a CPU computes, one vector of columns after the other."""

from __future__ import annotations

import math
from collections.abc import Sequence

from tvm.script import tirx as T

from ...spec import VectorTarget
from . import simd

# Annotates a parallel loop with the condition under which it is one. Otherwise the caller's thread
# does all items, and no other thread has to be woken.
PARALLEL_IF = "pagedkv.parallel_if"
PARALLEL_ELEMENTS = 1 << 15


@T.meta_class
class RowWorker:
    """A thread, which has all columns of a row to itself.

    Parameters
    ----------
    target : VectorTarget
    """

    def __init__(self, target: VectorTarget):
        self.target = target

    def items(self, count, size: int):
        """Loop over items that do not depend on each other, of about `size` elements each."""
        return T.parallel(count, annotations={PARALLEL_IF: count * size >= PARALLEL_ELEMENTS})

    def vectors(self, width: int, *bounds: int) -> Vectors:
        """Return the vectors that cover `width` columns, and begin anew at each of `bounds`."""
        return Vectors(width, math.gcd(width, *bounds, self.target.lanes))


@T.meta_class
class Vectors:
    """Vectors of consecutive columns.

    Parameters
    ----------
    width : int
        Number of columns, a multiple of `lanes`.
    lanes : int
        Columns of a vector.
    """

    arithmetic = simd

    def __init__(self, width: int, lanes: int):
        self.width, self.lanes = width, lanes

    def columns(self):
        """Loop over the first columns of the vectors."""
        return T.serial(T.int64(0), T.int64(self.width), step=self.lanes)

    def load(self, buffer, index: Sequence):
        """Load the vector at `index`, widened to float32."""
        return simd.load(buffer, index, self.lanes)

    def store(self, buffer, index: Sequence, value) -> None:
        """Round a float32 vector to the buffer's type and store it at `index`."""
        simd.store(buffer, index, self.lanes, value)

    def filled(self, number):
        """Return a vector of equal numbers."""
        return simd.broadcast(number, self.lanes)

    def constant(self, number: float):
        """Return a vector of equal constants."""
        return simd.constant(number, self.lanes)

    def temp(self, value):
        """Keep a vector in a register, so that later uses do not repeat its expression."""
        return self.arithmetic.temp(value, self.lanes)

    def sum(self, value):
        """Return the sum of the lanes of a vector."""
        return simd.reduce_lanes(value, self.lanes, simd.add)
