# SPDX-License-Identifier: Apache-2.0
"""Pairs of bfloat16 made of quantized K and V.

What codes stand for is rounded to bfloat16, as an append of a bfloat16 cache rounds: the error is a
fraction of that of the codes.
"""

from __future__ import annotations

from collections.abc import Sequence

from .bf16 import INT32, NeonPairs, PairOperands
from .simd import broadcast, shuffle, temp


class QuantizedPairs(PairOperands):
    """`PairOperands` whose K and V come from quantized pages."""

    def load_k(self, tile, row, element, lanes: int):
        """`lanes` elements of a row of K."""
        if lanes == self.lanes:
            halves = [tile.load_k(row, element * 2 + n, lanes) for n in (0, lanes)]
            return self.round(*(temp(half, lanes) for half in halves))
        numbers = self._whole(tile.load_k(row, element * 2, 2 * lanes), 2 * lanes)
        return shuffle([self.round(numbers, numbers)], range(lanes))

    def packed_v(self, tile, t: int, column, lanes: int, is_held: Sequence):
        """Rows `t` and ``t + 1`` of a tile of V in pairs, with zeros as of `PairOperands`."""
        both = [self._whole(tile.load_v(t + n, column, lanes), lanes) for n in range(2)]
        pairs = temp(self.repack(both), self.lanes, INT32)
        if lanes < self.lanes:
            pairs = shuffle([pairs], range(lanes))
        return self.select(pairs, is_held, lanes) if is_held else pairs

    def _whole(self, value, lanes: int):
        """A vector of all lanes, which repeats the numbers of a narrower one."""
        value = temp(value, lanes)
        if lanes == 1:
            return broadcast(value, self.lanes)
        while lanes < self.lanes:
            value, lanes = temp(shuffle([value, value], range(2 * lanes)), 2 * lanes), 2 * lanes
        return value


class QuantizedNeonPairs(QuantizedPairs, NeonPairs):
    """`QuantizedPairs` for AArch64."""
