# SPDX-License-Identifier: Apache-2.0
"""Scales of quantized rows, applied to scores and weights and not to the elements of K and V.

A score is multiplied by the scale of its row of K, and a weight by that of its row of V. Weights
become float16 before they are multiplied with V, so there they are kept within its range: relative
to a power of two that grows with the scales of V, and that the output is multiplied by in the end.
"""

from __future__ import annotations

from tvm.script import tirx as T

from ...codec import Codec
from ...layout import K_PLANE, V_PLANE
from ...script import inline
from ..registers import F32, U32, Registers, temp
from ..scores.softmax import scale_all
from .code_tiling import ROW_SCALES, WORD_BYTES, CodeTiling

_ROOM = 16.0  # scales of V may exceed the power of two by this factor before the output is scaled


def power_of_two(value):
    """The largest power of two that is no more than a number, which is not negative; 0 for 0."""
    bits = T.bitwise_and(T.reinterpret(U32, value), T.uint32(0x7F800000))
    return T.reinterpret(F32, bits)


def inverse(value):
    """The inverse of a number; 0 for 0."""
    return T.if_then_else(value > T.float32(0), T.float32(1) / value, T.float32(0))


@T.meta_class
class WeightRange:
    """Keeps weights times the scales of V in the range of the type that they are multiplied in.

    Parameters
    ----------
    isa : Isa
    codec : Codec
    dtype : str
        Of the widened values.
    """

    def __init__(self, isa, codec: Codec, dtype: str):
        self.isa, self.is_limited = isa, dtype == "float16"
        self.code_scale = isa.scale_of_codes(codec, dtype)
        self.top = T.local_scalar(F32)  # a power of two

    def factor(self):
        """Return the factor of all scales of V."""
        return temp(inverse(self.top) if self.is_limited else T.float32(1))

    @inline
    def reset(self):
        """Forget all scales."""
        self.top = T.float32(0)

    @inline
    def grow(self, output, scale_max):
        """Scale the output, if the largest scale that any of four lanes has is too large for it."""
        largest = self.isa.over_lanes(scale_max, T.max, 4)
        if largest > self.top * T.float32(_ROOM):
            top = power_of_two(largest)
            scale_all(output, temp(self.top * inverse(top)))
            self.top = top

    @inline
    def finish(self, output):
        """Multiply the output by what weights were divided by."""
        if self.is_limited or self.code_scale != 1.0:
            top = T.meta_var(self.top if self.is_limited else T.float32(1))
            scale_all(output, temp(top * T.float32(self.code_scale)))


@T.meta_class
class NoScales:
    """K and V are multiplied as they are."""

    def reset(self) -> None:
        """There are none."""

    def begin_tile(self, first) -> None:
        """There are none."""

    def scale_scores(self, scores, tile, lane) -> None:
        """There are none."""

    def scale_weights(self, weights, output, tile, lane) -> None:
        """There are none."""

    def finish(self, output) -> None:
        """There are none."""


@T.meta_class
class RowScales(NoScales):
    """Scales of the rows of the tiles that are multiplied, in shared memory.

    Parameters
    ----------
    memory : SharedMemory
    begin : int
        Byte at which the first one begins.
    positions : int
        Of a tile.
    codec : Codec
    dtype : str
        Of the widened values.
    """

    def __init__(self, memory, begin: int, positions: int, codec: Codec, dtype: str):
        self.memory, self.begin, self.positions = memory, begin, positions
        self.range = WeightRange(memory.isa, codec, dtype)

    def place(self, tile, row, plane):
        """Return the byte of the scale of a row of K (plane 0) or V (plane 1)."""
        size = CodeTiling.row_scales_bytes(self.positions)
        at = tile * size + (row * ROW_SCALES + plane) * WORD_BYTES
        return self.begin + at

    @inline
    def reset(self):
        """Forget all scales."""
        self.range.reset()

    @inline
    def finish(self, output):
        """Multiply the output by what weights were divided by."""
        self.range.finish(output)

    def scales_of_columns(self, plane: int, tile, lane, n, factor=None) -> list:
        """Load the scales of the thread's two columns of tile n of eight positions."""
        words = Registers(4, U32, "scales")
        row = n * 8 + T.truncmod(lane, 4) * 2
        self.memory.load([*words], self.place(tile, row, 0))
        scales = [temp(T.reinterpret(F32, words[e * ROW_SCALES + plane])) for e in range(2)]
        return scales if factor is None else [temp(scale * factor) for scale in scales]

    @inline
    def scale_scores(self, scores, tile, lane):
        """Multiply scores by the scales of their rows of K."""
        of_codes = T.meta_var(self.range.code_scale)
        factor = T.meta_var(None if of_codes == 1.0 else T.float32(of_codes))
        for n in T.unroll(scores.shape[0]):
            scale = T.meta_var(self.scales_of_columns(K_PLANE, tile, lane, n, factor))
            for h in T.unroll(scores.shape[1]):
                scores[n, h, 0] *= scale[0]
                scores[n, h, 1] *= scale[1]

    @inline
    def scale_weights(self, weights, output, tile, lane):
        """Multiply weights by the scales of their rows of V; the output may be scaled, too.

        The scale of a row that is hidden from a row of Q may be NaN; its weight stays 0.
        """
        if self.range.is_limited:
            largest = T.float32(0)
            for n in T.unroll(weights.shape[0]):
                scale = T.meta_var(self.scales_of_columns(V_PLANE, tile, lane, n))
                largest = T.max(T.max(largest, scale[0]), scale[1])
            self.range.grow(output, largest)
        factor = T.meta_var(self.range.factor())
        for n in T.unroll(weights.shape[0]):
            scale = T.meta_var(self.scales_of_columns(V_PLANE, tile, lane, n, factor))
            for h in T.unroll(weights.shape[1]):
                scale_visible(weights, n, h, scale)


def scale_visible(weights, n, h, scale: list) -> None:
    """Multiply two weights by their scales, unless they are 0."""
    for e in range(2):
        weight = weights[n, h, e]
        scaled = T.if_then_else(weight > T.float32(0), weight * scale[e], T.float32(0))
        T.buffer_store(weights, scaled, [n, h, e])
