# SPDX-License-Identifier: Apache-2.0
"""V that is not finite, where some rows of a tile see it and others do not.

A row multiplies what it does not see by a weight of 0, and 0 times NaN is NaN. To look for NaN in
every tile would cost time in every call, so a block looks at its output once, in the end. If a row
is not finite though its weights are numbers, the block attends again, with guard: it takes what is
not finite out of each tile of V, and makes the scores of these positions NaN. So the rows that see
them are NaN, and no others. Their logs, which do not depend on V, are those of the first pass.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

from tvm.script import tirx as T

from ...script import inline
from ...spec import KernelSpec
from ..registers import F32, I32, U32, WARP, Registers
from ..tiles.tiling import Tiling
from .block_memory import NUM_VARIABLES, BlockMemory
from .query_rows import QueryRows

MAX_POSITIONS = 128  # of a tile: each has a bit in shared memory
LARGEST = 3.0e38  # of all logs
_FIRST_WORD = NUM_VARIABLES
_NEEDED = _FIRST_WORD + MAX_POSITIONS // WARP
# The exponent bits of each number in a word, all of which are set if it is not finite.
_EXPONENTS = {
    "float32": (0x7F800000,),
    "float16": (0x7C00, 0x7C000000),
    "bfloat16": (0x7F80, 0x7F800000),
}
_QUICK, _CAREFUL, _DONE = range(3)


@T.meta_class
class NonFiniteGuard:
    """Whether a block attends with guard, and what it does then.

    Parameters
    ----------
    spec : KernelSpec
    tiling : Tiling
    rows : QueryRows
    memory : BlockMemory
    is_needed : bool
        False where all rows see the same columns. Codes of quantized V are always finite.
    sync : callable
        Emits the barrier after which the block reads tiles.
    """

    def __init__(
        self,
        spec: KernelSpec,
        tiling: Tiling,
        rows: QueryRows,
        memory: BlockMemory,
        is_needed: bool,
        sync: Callable,
    ):
        self.width, self.tiling, self.rows = spec.v_head_dim, tiling, rows
        self.isa, self.shared = memory.isa, memory.shared
        self.memory, self.is_needed = memory, is_needed and tiling.codes is None
        self.sync = sync
        self.num_words = -(-tiling.positions // WARP)
        self.own_rows = range(rows.count)
        self.mode = T.local_scalar(I32)

    @inline
    def begin(self):
        """Start a tile of rows, whose first pass has no guard."""
        self.mode = _QUICK

    def has_pass(self):
        """Whether the block has to attend, or has to do so again."""
        return self.mode < _DONE

    def is_first_pass(self):
        """Whether the block has attended without guard."""
        return self.mode == _QUICK

    def is_done(self):
        """Whether the block need not attend again."""
        return self.mode == _DONE

    @inline
    def begin_pass(self):
        """Note that no row has been found that needs care; a barrier has to follow."""
        if self.is_needed:
            self.shared.store(self.memory.word(_NEEDED), T.uint32(0))

    @inline
    def begin_tile(self, pipeline, stage):
        """Take out of V of a tile what is not finite, and note its positions."""
        if self.is_needed:
            if self.mode == _CAREFUL:
                self._clean(pipeline, stage)

    @inline
    def _clean(self, pipeline, stage):
        for turn in T.serial(T.ceildiv(self.tiling.positions, self.tiling.num_threads)):
            position = turn * self.tiling.num_threads + self.rows.thread
            bit = T.uint32(0)
            words = T.alloc_local((4,), U32, layout=None)
            if position < self.tiling.positions:
                for chunk in T.serial(pipeline.v_chunks):
                    place = T.meta_var(pipeline.v.place(stage, position, chunk))
                    self.shared.load([words[i] for i in range(4)], place)
                    if self._any_not_finite(words):
                        bit = T.shift_left(T.uint32(1), T.cast(position % WARP, U32))
                        self.shared.store(place, *[T.uint32(0)] * 4)
            for i in T.unroll(5):
                bit = T.bitwise_or(bit, self.isa.shuffle_xor(bit, T.shift_left(1, i)))
            if T.And(self.rows.lane == 0, position < self.tiling.positions):
                for word in T.unroll(self.num_words):
                    if T.truncdiv(position, WARP) == word:
                        self.shared.store(self.memory.word(_FIRST_WORD + word), bit)
        self.sync()

    def _any_not_finite(self, words):
        found = [
            T.bitwise_and(words[i], T.uint32(exponent)) == T.uint32(exponent)
            for i in range(4)
            for exponent in _EXPONENTS[self.tiling.kv_dtype]
        ]
        return functools.reduce(T.Or, found)

    @inline
    def mark(self, logits, scores):
        """Make the scores of the positions that `begin_tile` noted NaN."""
        if self.is_needed:
            if self.mode == _CAREFUL:
                words = T.meta_var(self._marks())
                for n in T.unroll(scores.shape[0]):
                    for h in T.unroll(scores.shape[1]):
                        for e in T.unroll(2):
                            scores[n, h, e] = T.if_then_else(
                                self._is_marked(words, logits.column(n, e)),
                                T.reinterpret(F32, T.uint32(0x7FC00000)),
                                scores[n, h, e],
                            )

    def _marks(self) -> Registers:
        words = Registers(self.num_words, U32, "marked")
        for i in range(words.count):
            self.shared.load([words[i]], self.memory.word(_FIRST_WORD + i))
        return words

    @staticmethod
    def _is_marked(words: Registers, column):
        word = words[words.count - 1]
        for i in reversed(range(words.count - 1)):
            word = T.if_then_else(column < (i + 1) * WARP, words[i], word)
        bit = T.shift_right(word, T.cast(T.truncmod(column, WARP), U32))
        return T.bitwise_and(bit, T.uint32(1)) != T.uint32(0)

    @inline
    def end_pass(self, o, lse, v_begin):
        """Decide whether the block has to attend again, after a barrier."""
        if self.is_needed:
            check = T.alloc_local((self.rows.count,), F32, layout=None)
            for h in T.unroll(self.rows.count):
                check[h] = T.float32(0)
            for n in T.unroll(min(self.tiling.columns, self.width) // 8):
                for h in T.unroll(self.rows.count):
                    for e in T.unroll(2):
                        # Adds 0, or NaN for what is not finite.
                        value = T.meta_var(self._column(o, n, h, e, v_begin))
                        check[h] = self.isa.fused_multiply_add(value, T.float32(0), check[h])
            if functools.reduce(T.Or, [self._is_wrong(check, lse, h) for h in self.own_rows]):
                self.shared.store(self.memory.word(_NEEDED), T.uint32(1))
            self.isa.sync_block()
            needed = T.uint32(0)
            self.shared.load([needed], self.memory.word(_NEEDED))
            if T.And(self.mode == _QUICK, needed != T.uint32(0)):
                self.mode = _CAREFUL
                self.isa.sync_block()  # all have seen the word
            else:
                self.mode = _DONE
        else:
            self.mode = _DONE

    def _column(self, o, n, h, e, v_begin):
        """Return an element of O; 0 past the columns of V, which may hold anything."""
        value = o[n, h, e]
        if self.tiling.slices == 1:
            return value
        return T.if_then_else(v_begin + n * 8 < self.width, value, T.float32(0))

    @staticmethod
    def _is_wrong(check, lse, h: int):
        """Whether a row that is not finite is not meant to be, by its log."""
        return T.And(check[h] != T.float32(0), lse[h] < T.float32(LARGEST))
