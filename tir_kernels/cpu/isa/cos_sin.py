# SPDX-License-Identifier: Apache-2.0
"""Cosines and sines of one position, and rows rotated by them, with vectors."""

from __future__ import annotations

from collections.abc import Callable

from tvm.script import tirx as T

from ...semantics.rope import inverse_frequencies, sin_cos
from ...spec import RopeSpec
from . import simd


@T.meta_class
class CosSin:
    """Rows of cosines and sines, each of a position, kept in two small buffers.

    Parameters
    ----------
    rope : RopeSpec
    lanes : int
        float32 lanes of a vector.
    num_rows : int
    """

    def __init__(self, rope: RopeSpec, lanes: int, num_rows: int = 1):
        self.rope, self.half, self.lanes = rope, rope.rotary_dim // 2, lanes
        self.chunks = simd.chunks(self.half, lanes)
        self.cos = T.alloc_buffer((num_rows, self.half), simd.F32)
        self.sin = T.alloc_buffer((num_rows, self.half), simd.F32)

    def fill(self, position, inv_freq: Callable | None = None, row=0) -> None:
        """Compute a row.

        Parameters
        ----------
        position : int32 expression
        inv_freq : callable (start, lanes) -> float32 vector, optional
            Inverse frequencies; None: those of `rope`, baked into the code.
        """
        table = inverse_frequencies(self.rope)
        scaled = T.cast(position, simd.F32)
        if self.rope.scale != 1.0:
            scaled = scaled * T.float32(self.rope.scale)
        scaled = simd.temp(scaled)
        for start, lanes in self.chunks:
            if inv_freq is None:
                frequencies = simd.literal(table.inv_freq[start : start + lanes])
            else:
                frequencies = inv_freq(start, lanes)
            rotation = sin_cos(simd.broadcast(scaled, lanes) * frequencies, lanes, simd)
            factor = simd.constant(table.attention_factor, lanes)
            for buffer, value in ((self.cos, rotation.cos), (self.sin, rotation.sin)):
                if table.attention_factor != 1.0:
                    value = value * factor
                simd.store(buffer, (row, start), lanes, value)

    def rotate(self, source: Callable, sink: Callable, row=0) -> None:
        """Rotate the leading `rotary_dim` elements of a vector by the angles of a row.

        Parameters
        ----------
        source : callable (dim, lanes) -> float32 vector
            Elements ``dim .. dim + lanes - 1``.
        sink : callable (dim, lanes, value)
            Takes the rotated elements. Both elements of a pair are read before either is written,
            so source and sink may be the same.
        """
        for start, lanes in self.chunks:
            first = simd.temp(source(start, lanes), lanes)
            second = simd.temp(source(start + self.half, lanes), lanes)
            first, second = self._turn(row, start, lanes, first, second)
            sink(start, lanes, first)
            sink(start + self.half, lanes, second)

    def reorder(self, numbers) -> None:
        """Bring the only row into the order of chunks of `RowNumbers`, for `rotate_chunk`."""
        for buffer in (self.cos, self.sin):
            for start, count in numbers.chunks(self.half):
                parts = numbers.parts(start, count)
                row = [simd.temp(simd.load(buffer, (0, at), lanes), lanes) for at, lanes in parts]
                for (at, lanes), value in zip(parts, numbers.reorder(row), strict=True):
                    simd.store(buffer, (0, at), lanes, value)

    def rotate_chunk(self, numbers, start, count: int, source: tuple, sink: tuple) -> None:
        """Rotate a chunk of a row and the one half a row behind, in the order of chunks.

        Source and sink are buffers with the leading indices of their rows.
        """
        (source, source_row), (sink, sink_row) = source, sink
        dims = (start, start + self.half)
        both = [numbers.load(source, (*source_row, dim), count) for dim in dims]
        turned = [
            self._turn(0, at, lanes, first, second)
            for (at, lanes), first, second in zip(numbers.parts(start, count), *both, strict=True)
        ]
        for dim, vectors in zip(dims, zip(*turned, strict=True), strict=True):
            numbers.store(sink, (*sink_row, dim), count, list(vectors))

    def _turn(self, row, start: int, lanes: int, first, second) -> tuple:
        """The pairs of two vectors, turned by the angles of a row from `start` on."""
        cos = simd.temp(simd.load(self.cos, (row, start), lanes), lanes)
        sin = simd.temp(simd.load(self.sin, (row, start), lanes), lanes)
        return turn(first, second, cos, sin, lanes)


def turn(first, second, cos, sin, lanes: int) -> tuple:
    """The pairs of two vectors turned by angles.

    Products are fused in one way, so that all kernels that rotate a row give it the same bits.
    """
    minus = second * simd.constant(-1.0, lanes)
    return tuple(
        simd.multiply_add(a, sin, simd.temp(b * cos, lanes), lanes)
        for a, b in ((minus, first), (first, second))
    )
