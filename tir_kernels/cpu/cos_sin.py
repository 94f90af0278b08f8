# SPDX-License-Identifier: Apache-2.0
"""Cosines and sines of one position, and rows rotated by them, with vectors."""

from __future__ import annotations

from collections.abc import Callable

from tvm.script import tirx as T

from ..semantics.rope import inverse_frequencies, sin_cos
from ..spec import RopeSpec
from . import simd
from .row_vectors import RowNumbers


class CosSin:
    """A row of cosines and sines for one position, kept in two small buffers.

    Parameters
    ----------
    rope : RopeSpec
    lanes : int
        float32 lanes of a vector.
    """

    def __init__(self, rope: RopeSpec, lanes: int):
        self.rope, self.half, self.lanes = rope, rope.rotary_dim // 2, lanes
        self.chunks = simd.chunks(self.half, lanes)
        self.cos = T.alloc_buffer((self.half,), simd.F32)
        self.sin = T.alloc_buffer((self.half,), simd.F32)

    def fill(self, position, inv_freq: Callable | None = None) -> None:
        """Compute the row.

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
                simd.store(buffer, (start,), lanes, value)

    def rotate(self, source: Callable, sink: Callable) -> None:
        """Rotate the leading `rotary_dim` elements of a row.

        Parameters
        ----------
        source : callable (dim, lanes) -> float32 vector
            Elements ``dim .. dim + lanes - 1`` of the row.
        sink : callable (dim, lanes, value)
            Takes the rotated elements. Both elements of a pair are read before either is written,
            so source and sink may be the same row.
        """
        for start, lanes in self.chunks:
            first = simd.temp(source(start, lanes), lanes)
            second = simd.temp(source(start + self.half, lanes), lanes)
            first, second = self._turn(start, lanes, first, second)
            sink(start, lanes, first)
            sink(start + self.half, lanes, second)

    def reorder(self, numbers: RowNumbers) -> None:
        """Bring the row into the order of chunks, for `rotate_chunk`."""
        for buffer in (self.cos, self.sin):
            for start, count in numbers.chunks(self.half):
                parts = numbers.parts(start, count)
                row = [simd.temp(simd.load(buffer, (at,), lanes), lanes) for at, lanes in parts]
                for (at, lanes), value in zip(parts, numbers.reorder(row), strict=True):
                    simd.store(buffer, (at,), lanes, value)

    def rotate_chunk(
        self, numbers: RowNumbers, start, count: int, source: tuple, sink: tuple
    ) -> None:
        """Rotate a chunk of a row and the one half a row behind, in the order of chunks.

        Source and sink are buffers with the leading indices of their rows.
        """
        (source, source_row), (sink, sink_row) = source, sink
        dims = (start, start + self.half)
        both = [numbers.load(source, (*source_row, dim), count) for dim in dims]
        turned = [
            self._turn(at, lanes, first, second)
            for (at, lanes), first, second in zip(numbers.parts(start, count), *both, strict=True)
        ]
        for dim, vectors in zip(dims, zip(*turned, strict=True), strict=True):
            numbers.store(sink, (*sink_row, dim), count, list(vectors))

    def _turn(self, start: int, lanes: int, first, second) -> tuple:
        """The pairs of two vectors, turned by the angles from `start` on."""
        cos = simd.temp(simd.load(self.cos, (start,), lanes), lanes)
        sin = simd.temp(simd.load(self.sin, (start,), lanes), lanes)
        return first * cos - second * sin, second * cos + first * sin
