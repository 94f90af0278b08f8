# SPDX-License-Identifier: Apache-2.0
"""Scales of quantized rows, applied to scores and weights and not to the elements of K and V.

A score is multiplied by the scale of its row of K, and a weight by that of its row of V. Weights
become float16 before they are multiplied with V, so there they are kept within its range: relative
to a power of two that grows with the scales of V, and that the output is multiplied by in the end.
"""

from __future__ import annotations

from tvm.script import tirx as T

from ...codec import Codec
from ..emit import F32, U32, Registers, index_temp, ptx
from ..scalars import temp
from ..warp import shuffle_xor
from .code_tiling import ROW_SCALES, WORD_BYTES, CodeTiling
from .codes import unit
from .online_softmax import Accumulators

_ROOM = 16.0  # scales of V may exceed the power of two by this factor before the output is scaled


def power_of_two(value):
    """The largest power of two that is no more than a number, which is not negative; 0 for 0."""
    bits = T.bitwise_and(T.reinterpret(U32, value), T.uint32(0x7F800000))
    return T.reinterpret(F32, bits)


def inverse(value):
    """The inverse of a number; 0 for 0."""
    return T.if_then_else(value > T.float32(0), T.float32(1) / value, T.float32(0))


class RowScales:
    """Scales of the rows of the tiles that are multiplied, in shared memory.

    Parameters
    ----------
    memory : uint8 Buffer in the scope "shared.dyn"
    begin : int
        Byte at which the first one begins.
    positions : int
        Of a tile.
    codec : Codec
    dtype : str
        Of the widened numbers.
    """

    def __init__(self, memory, begin: int, positions: int, codec: Codec, dtype: str):
        self.memory, self.begin, self.positions = memory, begin, positions
        self.unit, self.is_limited = unit(codec, dtype), dtype == "float16"
        self.top = Registers(1, F32, "v_scale_top")

    def pointer(self, tile, row, plane):
        """Where the scale of a row of K (plane 0) or V (plane 1) is."""
        size = CodeTiling.row_scales_bytes(self.positions)
        at = tile * size + (row * ROW_SCALES + plane) * WORD_BYTES
        return self.memory.ptr_to([self.begin + at])

    def reset(self) -> None:
        """Forget all scales."""
        self.top[0] = T.float32(0)

    def begin_tile(self, rows, first) -> None:
        """Go on with the tile of positions from `first` on."""

    def _pairs(self, plane: int, tile, lane, n) -> list:
        """The scales of the thread's two columns of tile n of eight positions."""
        words = Registers(4, U32, "scales")
        row = n * 8 + T.truncmod(lane, 4) * 2
        ptx("ld.shared.v4.b32", *[words[i] for i in range(4)], self.pointer(tile, row, 0))
        return [temp(T.reinterpret(F32, words[e * ROW_SCALES + plane])) for e in range(2)]

    def scale_scores(self, scores: Accumulators, tile, lane) -> None:
        """Multiply scores by the scales of their rows of K."""
        lane = index_temp(lane)
        with T.unroll(scores.num_tiles) as n:
            scales = self._pairs(0, tile, lane, n)
            if self.unit != 1.0:
                scales = [temp(scale * T.float32(self.unit)) for scale in scales]
            for h in range(scores.rows):
                for e in range(2):
                    scores[n, h, e] = scores[n, h, e] * scales[e]

    def scale_weights(self, weights: Accumulators, output: Accumulators, tile, lane) -> None:
        """Multiply weights by the scales of their rows of V; the output may be scaled, too.

        The scale of a row that is hidden from a row of Q may be NaN; its weight stays 0.
        """
        if self.is_limited:
            self._raise_top(weights, output, tile, lane)
        relative = inverse(self.top[0]) if self.is_limited else T.float32(1)
        factor = temp(relative)
        with T.unroll(weights.num_tiles) as n:
            scales = [temp(scale * factor) for scale in self._pairs(1, tile, lane, n)]
            for h in range(weights.rows):
                for e in range(2):
                    weight = weights[n, h, e]
                    weights[n, h, e] = T.if_then_else(
                        weight > T.float32(0), weight * scales[e], T.float32(0)
                    )

    def _raise_top(self, weights: Accumulators, output: Accumulators, tile, lane) -> None:
        largest = Registers(1, F32, "v_scale_max")
        largest[0] = T.float32(0)
        with T.unroll(weights.num_tiles) as n:
            for scale in self._pairs(1, tile, lane, n):
                largest[0] = T.max(largest[0], scale)
        for mask in (1, 2):
            largest[0] = T.max(largest[0], shuffle_xor(largest[0], mask))
        self._grow(output, largest[0])

    def _grow(self, output: Accumulators, largest) -> None:
        """Scale the output, if the largest scale is too large for it."""
        with T.If(largest > self.top[0] * T.float32(_ROOM)), T.Then():
            top = temp(power_of_two(largest))
            factor = temp(self.top[0] * inverse(top))
            self.top[0] = top

            def scale(n, h, e):
                output[n, h, e] = output[n, h, e] * factor

            output.for_each(scale)

    def finish(self, output: Accumulators) -> None:
        """Multiply the output by what weights were divided by."""
        if not self.is_limited and self.unit == 1.0:
            return
        factor = temp((self.top[0] if self.is_limited else T.float32(1)) * T.float32(self.unit))

        def scale(n, h, e):
            output[n, h, e] = output[n, h, e] * factor

        output.for_each(scale)
