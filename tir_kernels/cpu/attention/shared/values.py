# SPDX-License-Identifier: Apache-2.0
"""Scalars of V for `SharedTile`, in a separate packed tile or in that of K.

A latent row of MLA is K, and V with its first columns: a tile of it is copied once.
"""

from __future__ import annotations

from tvm.script import tirx as T

from ....spec import KernelSpec
from ...columns import Chunk, chunks
from ...operands import copy_v
from ...simd import broadcast, load, store, temp


def values_of(spec: KernelSpec, ops, k, num_positions: int):
    """Choose how a tile of V is kept; `k` is the buffer ``[position, element]`` of K."""
    if spec.kind == "mla" and ops.numbers == 1:
        return ValuesInK(spec, ops, k)
    if spec.kind == "mla" and spec.v_head_dim % (2 * ops.lanes) == 0:
        return SplitValues(spec, ops, k, num_positions)
    return PackedValues(spec, ops, num_positions)


class PackedValues:
    """V packed beside K: ``[position, column]``."""

    step = 1  # from the column of a scalar to that of the next

    def __init__(self, spec: KernelSpec, ops, num_positions: int):
        self.ops, self.width, self.num_positions = ops, spec.v_head_dim, num_positions
        shape = (num_positions // ops.numbers, self.width)
        self.v = T.alloc_buffer(shape, ops.dtype)

    def take(self, position, column: Chunk, words: list) -> None:
        """Nothing to do with the words of K."""

    def pack(self, rows, first, kv_len) -> None:
        """Take a tile of positions from `first` on, with zeros from `kv_len` on."""
        copy_v(self.ops, rows, first, self._at, self.width, self.num_positions, kv_len)

    def _at(self, position, column) -> tuple:
        return self.v, (position, column)

    def scalar(self, position, start, j: int):
        """Scalar ``start + j`` at an element of positions."""
        return self.v[position, start + j]

    def column(self, start):
        """The column of scalar `start`, a multiple of 8; the next ones are `step` apart."""
        return start


class ValuesInK(PackedValues):
    """The first columns of the tile of K."""

    def __init__(self, spec: KernelSpec, ops, k):
        self.ops, self.v, self.width = ops, k, spec.v_head_dim

    def pack(self, rows, first, kv_len) -> None:
        """Clear the positions that do not exist."""
        self._clear(first, kv_len, int(self.v.shape[0]))

    def _clear(self, first, kv_len, num_positions: int) -> None:
        num_seen = T.min(num_positions, kv_len - first)
        with T.serial(num_positions - num_seen) as i:
            for c in chunks(self.width // self.ops.numbers, self.ops.lanes):
                zero = broadcast(T.cast(0, self.ops.dtype), c.lanes)
                store(self.v, (num_seen + i, c.start), c.lanes, zero, self.ops.dtype)


class SplitValues(ValuesInK):
    """Pairs of positions made of pairs of columns, which takes no shuffles.

    Of each 32 columns the even ones lie in a vector and the odd ones in the next: scalars are in
    that order. A row is one vector longer, or the rows that a register tile reads one after another
    would share two sets of the cache.
    """

    step = 2

    def __init__(self, spec: KernelSpec, ops, k, num_positions: int):
        super().__init__(spec, ops, k)
        self.k, self.num_positions = k, num_positions
        shape = (num_positions // 2, self.width + ops.lanes)
        self.split = T.alloc_buffer(shape, ops.dtype)

    def take(self, position, column: Chunk, words: list) -> None:
        """Split words of consecutive rows of K, the first at an even `position`."""
        if column.start >= self.width // 2:
            return
        for i in range(0, len(words), 2):
            pair = (position + i) // 2
            for j, value in enumerate(self.ops.split_words(*words[i : i + 2])):
                at = (pair, column.start * 2 + j * self.ops.lanes)
                store(self.split, at, self.ops.lanes, value, self.ops.dtype)

    def pack(self, rows, first, kv_len) -> None:
        """Clear the positions that do not exist, and split what is left."""
        lanes, dtype = self.ops.lanes, self.ops.dtype
        with T.If(kv_len - first < self.num_positions), T.Then():
            super().pack(rows, first, kv_len)
            with T.serial(self.num_positions // 2) as pair:
                for c in chunks(self.width // 2, lanes):
                    words = [load(self.k, (pair * 2 + i, c.start), lanes, dtype) for i in range(2)]
                    self.take(pair * 2, c, [temp(w, lanes, dtype) for w in words])

    def scalar(self, position, start, j: int):
        """Scalar ``start + j`` at a pair of positions."""
        return self.split[position, start + j]

    def column(self, start):
        """The column of scalar `start`, a multiple of 8; the next ones are `step` apart."""
        lanes = self.ops.lanes
        return start // 32 * 32 + start % lanes * 2 + start // lanes % 2
