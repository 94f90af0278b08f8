# SPDX-License-Identifier: Apache-2.0
"""Where the scalars of V lie for `shared_unit`: in a packed tile of their own, or in that of K.

A latent row of MLA is K, and V with its first columns: a tile of it is copied once.
"""

from __future__ import annotations

from tvm.script import tirx as T

from ..spec import KernelSpec
from .columns import chunks
from .simd import broadcast, load, store, temp


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

    def pack(self, rows, first, kv_len) -> None:
        """Take a tile of positions from `first` on, with zeros from `kv_len` on."""
        self.ops.pack_v(rows, first, kv_len, self.v, self.width, self.num_positions)

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
    that order, sixteen of all positions side by side, as a register tile reads them.
    """

    step = 2

    def __init__(self, spec: KernelSpec, ops, k, num_positions: int):
        super().__init__(spec, ops, k)
        self.k, self.num_positions = k, num_positions
        shape = (self.width // ops.lanes, num_positions // 2, ops.lanes)
        self.split = T.alloc_buffer(shape, ops.dtype)

    def pack(self, rows, first, kv_len) -> None:
        """Split the words of K."""
        super().pack(rows, first, kv_len)
        ops, lanes = self.ops, self.ops.lanes

        def words(position, vector):
            value = load(self.k, (position, vector * lanes), lanes, ops.dtype)
            return temp(value, lanes, ops.dtype)

        with T.serial(self.num_positions // 2) as pair, T.serial(self.width // 32) as vector:
            both = [words(pair * 2 + i, vector) for i in range(2)]
            for i, value in enumerate(ops.split_words(*both)):
                store(self.split, (vector * 2 + i, pair, 0), lanes, value, ops.dtype)

    def scalar(self, position, start, j: int):
        """Scalar ``start + j`` at a pair of positions."""
        lanes = self.ops.lanes
        return self.split[start // lanes, position, start % lanes + j]

    def column(self, start):
        """The column of scalar `start`, a multiple of 8; the next ones are `step` apart."""
        lanes = self.ops.lanes
        return start // 32 * 32 + start % lanes * 2 + start // lanes % 2
