# SPDX-License-Identifier: Apache-2.0
"""Columns of a recurrent state: what a token recalls of them, and how it updates them."""

import math
from dataclasses import dataclass
from typing import Any, NamedTuple

from tvm.script import tirx as T

from ...recurrent_spec import RecurrentSpec
from ...script import inline
from ..isa.simd import (
    F32,
    broadcast,
    constant,
    elements_per_line,
    load,
    multiply_add,
    prefetch,
    ramp,
    store,
)
from .recurrent_token import RecurrentToken
from .state_numbers import load_numbers, rounded, safe, store_numbers

HEAD_BYTES = 64 * 1024  # that a task updates where they lie: a quarter of a small L2 cache
TILE_BYTES = 16 * 1024  # that a task copies to the L1 cache: half of a small one
SUMS = 4  # independent vectors of sums, so that multiply-adds do not wait for each other


class Block(NamedTuple):
    """Columns of a state that a task works on.

    Attributes
    ----------
    lanes, vectors : int
        Columns of a vector, and vectors of the block.
    rows : int
        Rows of the state that are summed apart.
    """

    lanes: int
    vectors: int
    rows: int

    @property
    def width(self) -> int:
        """Columns of the block."""
        return self.vectors * self.lanes


def blocks_of(spec: RecurrentSpec) -> tuple[Block, Block]:
    """Choose a wide block and that of a tile, whose sums have the same order.

    A wide block is contiguous memory where it has all columns. Its sums and what is written take
    most registers.
    """
    lanes = math.gcd(spec.value_dim, spec.target.lanes)

    def vectors_of(num_bytes: int, most: int) -> int:
        fitting = max(1, num_bytes // (4 * spec.key_dim * lanes))
        return math.gcd(spec.value_dim // lanes, most, 1 << fitting.bit_length() - 1)

    tile = vectors_of(TILE_BYTES, SUMS)
    wide = max(tile, vectors_of(HEAD_BYTES, spec.target.registers // 4))
    rows = math.gcd(spec.key_dim, SUMS // tile)
    return Block(lanes, wide, rows), Block(lanes, tile, rows)


@dataclass(frozen=True)
class Place:
    """The location of columns: the rows of an array, from a column on.

    Parameters
    ----------
    buffer : Buffer ``[.., key channel, column]``
    index : tuple
        Indices before the key channel.
    column : int32 expression
    """

    buffer: Any
    index: tuple
    column: Any

    def at(self, d, j) -> tuple:
        """Return the index of column j in row d."""
        return (*self.index, d, self.column + j)


@T.meta_class
class RowSums:
    """Sums over the rows of a state, for each column of a block."""

    def __init__(self, block: Block):
        self.lanes, self.vectors, self.rows = block
        self.sums = T.alloc_local((self.rows, block.width), F32)

    def at(self, j):
        """Return the lanes of vector j."""
        return ramp(j * self.lanes, self.lanes)

    @inline
    def clear(self):
        """Start from zeros."""
        for i in T.unroll(self.rows):
            for j in T.unroll(self.vectors):
                self.sums[i, self.at(j)] = constant(0.0, self.lanes)

    @inline
    def add(self, i, j, factor, vector):
        """Add the product of a number and vector j of a row of the state."""
        self.sums[i, self.at(j)] = multiply_add(
            broadcast(factor, self.lanes), vector, self.sums[i, self.at(j)], self.lanes
        )

    def total(self, j):
        """Return vector j of the sums over all rows."""
        total = self.sums[0, self.at(j)]
        for i in range(1, self.rows):
            total = total + self.sums[i, self.at(j)]
        return total


@T.meta_class
class StateColumns:
    """A block of columns of a head's state, and the sums that tokens read of it.

    Parameters
    ----------
    spec : RecurrentSpec
    block : Block
    token : RecurrentToken
    """

    def __init__(self, spec: RecurrentSpec, block: Block, token: RecurrentToken):
        self.spec, self.token = spec, token
        self.lanes, self.vectors, self.rows = block
        self.steps = spec.key_dim // block.rows
        self.recalled, self.output = RowSums(block), RowSums(block)
        self.written = T.alloc_local((block.width,), F32)
        self.lines = range(0, block.width, elements_per_line(spec.state_dtype))

    @inline
    def clear(self, sink):
        """Set the columns to zeros."""
        for d in range(self.spec.key_dim):
            for j in T.unroll(self.vectors):
                zero = T.meta_var(constant(0.0, self.lanes))
                store_numbers(sink.buffer, sink.at(d, j * self.lanes), self.lanes, zero)

    @inline
    def copy(self, source, sink):
        """Copy the columns."""
        for d in range(self.spec.key_dim):
            for j in T.unroll(self.vectors):
                at = T.meta_var(source.at(d, j * self.lanes))
                value = T.meta_var(load_numbers(source.buffer, at, self.lanes))
                store_numbers(sink.buffer, sink.at(d, j * self.lanes), self.lanes, value)

    @inline
    def recall(self, turn, source):
        """Sum up what a token recalls."""
        self.recalled.clear()
        for step in range(self.steps):
            for i in T.unroll(self.rows):
                d = T.meta_var(step * self.rows + i)
                factor = self.token.recalling[turn, d]
                for j in T.unroll(self.vectors):
                    value = load_numbers(source.buffer, source.at(d, j * self.lanes), self.lanes)
                    self.recalled.add(i, j, factor, value)

    @inline
    def write(self, turn, kept, page, offset, head, column):
        """Take what a token writes: its v, less what it recalled."""
        for j in T.unroll(self.vectors):
            at = T.meta_var((page, offset, head, column + j * self.lanes))
            value = T.meta_var(load(kept.v, at, self.lanes))
            if self.spec.is_delta:
                beta = T.meta_var(broadcast(kept.beta[page, offset, head], self.lanes))
                recalled = T.meta_var(self.token.decayed(turn, self.recalled.total(j), self.lanes))
                self._write(j, beta * (value - recalled))
            else:
                self._write(j, value)

    def _write(self, j, value) -> None:
        value = safe(value, self.spec.state_dtype, self.lanes)
        T.buffer_store(self.written, value, [self.output.at(j)])

    @inline
    def update(self, turn, source, sink, is_read, recalls, ahead):
        """Update the columns with a token, and sum up what a query reads of them if `is_read`.

        With `recalls` also what the next token recalls, so it need not load them again. With
        ``ahead = (place, 1)`` ask for the columns that lie there, with 0 for the first row only.
        """
        lanes, token = T.meta_var((self.lanes, self.token))
        if is_read:
            self.output.clear()
        if recalls:
            self.recalled.clear()
        for step in range(self.steps):
            for i in T.unroll(self.rows):
                d = T.meta_var(step * self.rows + i)
                key, decay = token.k[turn, d], token.decay(turn, d)
                for j in T.unroll(self.vectors):
                    old = T.meta_var(load_numbers(source.buffer, source.at(d, j * lanes), lanes))
                    decayed = T.meta_var(old * broadcast(decay, lanes))
                    written = T.meta_var(self.written[self.output.at(j)])
                    exact = T.meta_var(multiply_add(broadcast(key, lanes), written, decayed, lanes))
                    new = rounded(exact, self.spec.state_dtype, lanes)
                    store_numbers(sink.buffer, sink.at(d, j * lanes), lanes, new)
                    if is_read:
                        self.output.add(i, j, token.q[turn, d], new)
                    if recalls:
                        self.recalled.add(i, j, token.recalling[1 - turn, d], new)
                if ahead is not None:
                    place, is_asked = T.meta_var(ahead)
                    for j in T.unroll(len(self.lines)):
                        prefetch(place.buffer, place.at(d * is_asked, j * self.lines.step))

    @inline
    def answer(self, o, row, head, column):
        """Store what a query has read."""
        for j in T.unroll(self.vectors):
            at = T.meta_var((row, head, column + j * self.lanes))
            store(o, at, self.lanes, self.output.total(j))
