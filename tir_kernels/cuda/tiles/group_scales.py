# SPDX-License-Identifier: Apache-2.0
"""Scales of groups of columns, as they were copied from the pages: bfloat16 numbers."""

from __future__ import annotations

from collections.abc import Callable

from tvm.script import tirx as T

from ..emit import F32, U32, Registers, ptx
from ..scalars import temp
from ..warp import shuffle_xor
from .online_softmax import Accumulators
from .row_scales import RowScales, inverse


class GroupScales(RowScales):
    """Scales of the tiles of a pipeline; products apply them, so nothing is left to be scaled.

    Parameters
    ----------
    pipeline : CodePipeline
        Whose stages hold the scales.
    lane : int32 expression
    dtype : str
        Of the widened numbers.
    """

    def __init__(self, pipeline, lane, dtype: str):
        codes = pipeline.codes
        super().__init__(pipeline.memory, 0, pipeline.tiling.positions, codes.codec, dtype)
        self.pipeline, self.lane, self.num_groups = pipeline, lane, len(codes.groups)
        self.rows, self.first = None, None

    def begin_tile(self, rows, first) -> None:
        """Go on with the tile of positions from `first` on."""
        self.rows, self.first = rows, first

    def scale_scores(self, scores: Accumulators, tile, lane) -> None:
        """Products are scaled already."""

    def scale_weights(self, weights, output, tile, lane) -> None:
        """The weights of each group of columns are scaled when they are multiplied."""

    def of_columns(self, plane: int, stage, n) -> Callable:
        """Load the scales of the thread's two columns of tile n of eight positions.

        Returns
        -------
        callable
            ``(e, group)`` -> float32, of column e.
        """
        num_words = self.pipeline.codes.scale_words
        first_word = plane * num_words
        words = [Registers(num_words, U32, "scales") for _ in range(2)]
        row = n * 8 + T.truncmod(self.lane, 4) * 2
        for e in range(2):
            for word in range(0, num_words, 2):
                count = min(2, num_words - word) if num_words % 2 == 0 else 1
                for at in range(word, min(word + 2, num_words), count):
                    taken = [words[e][at + i] for i in range(count)]
                    pointer = self.pipeline.word_pointer(stage, row + e, first_word + at)
                    ptx(f"ld.shared{f'.v{count}' if count > 1 else ''}.b32", *taken, pointer)
            if self.num_groups % 2:  # the first one may be the second half of a word
                self._shift(words[e], plane, row + e)

        def scale(e: int, group: int):
            word = words[e][group // 2]
            if group % 2:
                bits = T.bitwise_and(word, T.uint32(0xFFFF0000))
            else:
                bits = T.shift_left(word, T.uint32(16))
            return temp(T.reinterpret(F32, bits))

        return scale

    def _shift(self, words: Registers, plane: int, row) -> None:
        shift = self.rows.scale_shift(plane, self.first + row)
        with T.If(shift != 0), T.Then():
            for i in range(words.count):
                following = words[i + 1] if i + 1 < words.count else T.uint32(0)
                words[i] = T.bitwise_or(
                    T.shift_right(words[i], T.uint32(16)),
                    T.shift_left(following, T.uint32(16)),
                )

    def raise_top(self, weights: Accumulators, output: Accumulators, stage):
        """Scale the output where scales of V have grown; returns the factor of all scales."""
        if not self.is_limited:
            return T.float32(1)
        largest = Registers(1, F32, "v_scale_max")
        largest[0] = T.float32(0)
        with T.unroll(weights.num_tiles) as n:
            scale = self.of_columns(1, stage, n)
            for e in range(2):
                for group in range(self.num_groups):
                    value = scale(e, group)
                    largest[0] = T.max(largest[0], T.max(value, -value))
        for mask in (1, 2):
            largest[0] = T.max(largest[0], shuffle_xor(largest[0], mask))
        self._grow(output, largest[0])
        return temp(inverse(self.top[0]))
