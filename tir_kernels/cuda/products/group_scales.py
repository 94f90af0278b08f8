# SPDX-License-Identifier: Apache-2.0
"""Scales of groups of columns, as they were copied from the pages: bfloat16 values."""

from __future__ import annotations

from tvm.script import tirx as T

from ...gpu.registers import F32, I32, U32
from ...gpu.tiles.row_scales import RowScales, WeightRange
from ...layout import V_PLANE
from ...script import inline


@T.meta_class
class GroupScales(RowScales):
    """Scales of the tiles of a pipeline; products apply them, so nothing is left to be scaled.

    Parameters
    ----------
    pipeline : CodePipeline
        Whose stages hold the scales.
    lane : int32 expression
    dtype : str
        Of the widened values.
    """

    def __init__(self, pipeline, lane, dtype: str):
        codes, isa = pipeline.codes, pipeline.isa
        self.pipeline, self.lane = pipeline, lane
        self.num_groups, self.num_words = len(codes.groups), codes.scale_words
        self.range = WeightRange(isa, codes.codec, dtype)
        self.first = T.local_scalar(I32)

    @inline
    def begin_tile(self, first):
        """Start the tile of positions that begins at `first`."""
        self.first = first

    def scale_scores(self, scores, tile, lane) -> None:
        """Products are scaled already."""

    def scale_weights(self, weights, output, tile, lane) -> None:
        """The weights of each group of columns are scaled when they are multiplied."""

    def allocate(self, tiles: int):
        """Allocate words for the scales of the thread's two columns of tiles."""
        return T.alloc_local((tiles, 2, self.num_words), U32, layout=None)

    @inline
    def load(self, words, i, plane, stage, n):
        """Load the scales of tile n of eight positions to tile i of the words."""
        row = T.meta_var(n * 8 + T.truncmod(self.lane, 4) * 2)
        at_once = T.meta_var(2 if self.num_words % 2 == 0 else 1)
        for e in T.unroll(2):
            for turn in T.unroll(self.num_words // at_once):
                first = T.meta_var(turn * at_once)
                taken = T.meta_var([words[i, e, first + j] for j in range(at_once)])
                word = T.meta_var(plane * self.num_words + first)
                place = T.meta_var(self.pipeline.word_place(stage, row + e, word))
                self.pipeline.memory.load(taken, place)
            if self.num_groups % 2 == 1:  # the first one may be the second half of a word
                if self.pipeline.rows.scale_shift(plane, self.first + row + e) != 0:
                    for word in T.unroll(self.num_words - 1):
                        words[i, e, word] = T.bitwise_or(
                            T.shift_right(words[i, e, word], T.uint32(16)),
                            T.shift_left(words[i, e, word + 1], T.uint32(16)),
                        )
                    last = T.meta_var(self.num_words - 1)
                    words[i, e, last] = T.shift_right(words[i, e, last], T.uint32(16))

    def scale(self, words, i, e, group):
        """Return the scale of a group of column e of tile i of the words."""
        word = words[i, e, T.truncdiv(group, 2)]
        low, high = T.shift_left(word, T.uint32(16)), T.bitwise_and(word, T.uint32(0xFFFF0000))
        return T.reinterpret(F32, T.if_then_else(T.truncmod(group, 2) == 0, low, high))

    @inline
    def raise_top(self, weights, output, stage):
        """Scale the output where scales of V have grown."""
        if self.range.is_limited:
            words = T.meta_var(self.allocate(1))
            largest = T.float32(0)
            for n in T.unroll(weights.shape[0]):
                self.load(words, 0, V_PLANE, stage, n)
                for e in T.unroll(2):
                    for group in T.unroll(self.num_groups):
                        scale = self.scale(words, 0, e, group)
                        largest = T.max(largest, T.max(scale, -scale))
            self.range.grow(output, largest)
