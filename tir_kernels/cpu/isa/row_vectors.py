# SPDX-License-Identifier: Apache-2.0
"""The numbers of rows as float32 vectors and back, in whatever order costs least.

Narrow numbers that are converted one vector at a time keep a core busier than its caches. Where
the CPU rounds two vectors to bfloat16 at once, a chunk is therefore twice as wide, and its vectors
are its even and its odd numbers: words are split in place, nothing moves across lanes.
"""

from __future__ import annotations

from collections.abc import Sequence

from tvm.script import tirx as T

from ...script import opened
from ...spec import VectorTarget
from . import simd
from .bf16 import PairOperands
from .operands import Float32Operands


@T.meta_class
class RowNumbers:
    """Loads and stores chunks of the rows of some buffers, all in one order.

    Parameters
    ----------
    target : VectorTarget
    buffers : the buffers, whose last axis is the row; made where they are matched.
    """

    def __init__(self, target: VectorTarget, buffers: Sequence):
        self.lanes = target.lanes
        has_pairs = target.has_bf16_dot and target.lanes == PairOperands.lanes
        has_pairs = has_pairs and buffers and all(str(b.dtype) == "bfloat16" for b in buffers)
        self.ops = PairOperands() if has_pairs else Float32Operands(target.lanes)
        self.ops.begin(buffers)
        self.views = [view for _, view in self.ops.views] if has_pairs else []
        self.wide = self.ops.values_per_element * self.lanes

    def scope(self):
        """Open the scope in which loads and stores may be emitted."""
        return self.ops.scope()

    def open_scope(self) -> None:
        """Open that scope for the rest of a kernel."""
        opened(self.scope())

    def chunks(self, width: int) -> list[tuple[int, int]]:
        """Cover a row with chunks: (start, count)."""
        return simd.chunks(width, self.wide)

    def parts(self, start: int, count: int) -> list[tuple[int, int]]:
        """The vectors of a chunk: (start, lanes), in numbers of a row of float32."""
        if self._is_plain(count):
            return [(start, count)]
        return [(start + i, self.lanes) for i in range(0, count, self.lanes)]

    def lanes_of(self, count: int) -> int:
        """Return the lanes of the vectors of a chunk."""
        return count if self._is_plain(count) else self.lanes

    def load(self, buffer, index: Sequence, count: int) -> list:
        """The float32 vectors of a chunk."""
        if self._is_plain(count):
            return [simd.temp(simd.load(buffer, index, count), count)]
        return self.ops.unpack(self.ops.pairs(buffer, _element(index), self.lanes))

    def store(self, buffer, index: Sequence, count: int, vectors: list) -> None:
        """Round the vectors of a chunk and store them."""
        if self._is_plain(count):
            simd.store(buffer, index, count, vectors[0])
        else:
            self.ops.store_pairs(buffer, _element(index), self.lanes, self.ops.repack(vectors))

    def reorder(self, chunk: list) -> list:
        """Vectors of consecutive numbers as the vectors of a chunk."""
        if len(chunk) == 1:
            return chunk
        odds = range(1, 2 * self.lanes, 2)
        return [simd.shuffle(chunk, [i - 1 for i in odds]), simd.shuffle(chunk, odds)]

    def _is_plain(self, count: int) -> bool:
        return count < self.wide or self.ops.values_per_element == 1


def _element(index: Sequence) -> tuple:
    *outer, column = index
    return (*outer, column // 2)
