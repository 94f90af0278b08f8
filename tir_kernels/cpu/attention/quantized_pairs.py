# SPDX-License-Identifier: Apache-2.0
"""Pairs of bfloat16 made of quantized K and V.

What codes stand for is rounded to bfloat16, as an append of a bfloat16 cache rounds: the error is a
fraction of that of the codes.
"""

from __future__ import annotations

from tvm.script import tirx as T

from ..bf16 import INT32, PairOperands
from ..columns import for_columns
from ..operands import ROWS_AT_ONCE, within
from ..simd import broadcast, shuffle, store, temp


class QuantizedPairs(PairOperands):
    """`PairOperands` whose K and V come from quantized pages."""

    def load_k(self, tile, row, element, lanes: int):
        """`lanes` elements of a row of K."""
        if lanes == self.lanes:
            halves = [tile.load_k(row, element * 2 + n, lanes) for n in (0, lanes)]
            return self.round(*(temp(half, lanes) for half in halves))
        numbers = self._whole(tile.load_k(row, element * 2, 2 * lanes), 2 * lanes)
        return shuffle([self.round(numbers, numbers)], range(lanes))

    def pack_v(
        self, rows, first, kv_len, packed, width: int, num_positions: int, begin=None
    ) -> None:
        """Interleave pairs of rows of V, with zeros as of `Float32Operands`."""
        with T.serial(num_positions // ROWS_AT_ONCE) as i:
            row = i * ROWS_AT_ONCE
            tile = rows.tile(first + row, ROWS_AT_ONCE)

            def columns(start, parts):
                for t in range(0, ROWS_AT_ONCE, 2):
                    for c in parts:
                        both = [
                            self._whole(tile.load_v(t + n, start + c.start, c.lanes), c.lanes)
                            for n in range(2)
                        ]
                        pairs = temp(self.repack(both), self.lanes, INT32)
                        if c.lanes < self.lanes:
                            pairs = shuffle([pairs], range(c.lanes))
                        if kv_len is not None:
                            position = first + row + t
                            pairs = self.select(
                                pairs,
                                lambda n, at=position: within(at + n, begin, kv_len),
                                c.lanes,
                            )
                        at = packed((row + t) // 2, start + c.start)
                        store(*at, c.lanes, pairs, INT32)

            for_columns(width, self.lanes, 1, columns)

    def _whole(self, value, lanes: int):
        """A vector of all lanes, which repeats the numbers of a narrower one."""
        value = temp(value, lanes)
        if lanes == 1:
            return broadcast(value, self.lanes)
        while lanes < self.lanes:
            value, lanes = temp(shuffle([value, value], range(2 * lanes)), 2 * lanes), 2 * lanes
        return value
