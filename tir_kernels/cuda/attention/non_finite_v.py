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
from ..emit import F32, U32, WARP, Registers, Variable, index_temp, ptx, sync_block
from ..scalars import fused_multiply_add
from ..tiles.tiling import BlockTiling
from ..warp import shuffle_xor

# Words of shared memory of a tile: a bit for each position of a tile, and whether care is needed.
FIRST_WORD = 9
MAX_POSITIONS = 64
LARGEST = 3.0e38  # of all logs
_NEEDED = FIRST_WORD + MAX_POSITIONS // 32
# What the exponents of the numbers in a word are if they are not finite.
_EXPONENTS = {
    "float32": (0x7F800000,),
    "float16": (0x7C00, 0x7C000000),
    "bfloat16": (0x7F80, 0x7F800000),
}
_QUICK, _CAREFUL, _DONE = range(3)


def with_guard(attend: Callable[[NonFiniteGuard | None], None], tiling: BlockTiling) -> None:
    """Emit ``attend(guard)`` for a tile, and again where it has to be careful.

    It has to make a `QueryTile` with this care and to run it, or nothing. Codes of quantized V are
    always finite, so these need no guard: ``attend(None)``.
    """
    if tiling.codes:
        attend(None)
        return
    mode = Variable(T.int32(_QUICK), name="mode")
    following = Variable(T.int32(_DONE), name="following")
    with T.While(mode.get() < _DONE):
        following.set(T.int32(_DONE))
        attend(NonFiniteGuard(mode, following))
        mode.set(following.get())


@inline
def mark_scores(scores, is_marked):
    """Make the scores of columns NaN: ``is_marked(n, e)``."""
    for n in T.unroll(scores.shape[0]):
        for h in T.unroll(scores.shape[1]):
            for e in T.unroll(2):
                not_a_number = T.meta_var(T.reinterpret(F32, T.uint32(0x7FC00000)))
                scores[n, h, e] = T.if_then_else(is_marked(n, e), not_a_number, scores[n, h, e])


class NonFiniteGuard:
    """Whether a block attends with guard, and what it does then.

    Parameters
    ----------
    mode, following : Variable
        How it attends, and how it shall do so next; the same in all threads of a block.
    """

    def __init__(self, mode: Variable, following: Variable):
        self.mode, self.following = mode, following

    @property
    def _is_careful(self):
        return self.mode.get() == _CAREFUL

    def begin(self, tile) -> None:
        """Note that no row has been found that needs care; a barrier has to follow."""
        ptx("st.shared.b32", tile.word_pointer(_NEEDED), T.uint32(0))

    def begin_tile(self, tile, stage) -> None:
        """Take out of V of a tile what is not finite, and note its positions."""
        with T.If(self._is_careful), T.Then():
            tiling, zeros = tile.tiling, [T.uint32(0)] * 4
            with T.serial(T.ceildiv(tiling.positions, tiling.num_threads)) as turn:
                position = index_temp(turn * tiling.num_threads + tile.thread)
                bit = Variable(T.uint32(0), U32, "bit")
                with T.If(position < tiling.positions), T.Then():
                    with T.serial(tile.v_chunks) as chunk:
                        words, pointer = Registers(4, U32), tile.v.pointer(stage, position, chunk)
                        ptx("ld.shared.v4.b32", *[words[i] for i in range(4)], pointer)
                        with T.If(self._any_not_finite(words, tiling.kv_dtype)), T.Then():
                            bit.set(T.shift_left(T.uint32(1), T.cast(position % WARP, U32)))
                            ptx("st.shared.v4.b32", pointer, *zeros)
                for mask in (1, 2, 4, 8, 16):
                    bit.set(T.bitwise_or(bit.get(), shuffle_xor(bit.get(), mask)))
                is_first = T.And(tile.lane == 0, position < tiling.positions)
                with T.If(is_first), T.Then():
                    for word in range(-(-tiling.positions // WARP)):
                        with T.If(T.truncdiv(position, WARP) == word), T.Then():
                            ptx("st.shared.b32", tile.word_pointer(FIRST_WORD + word), bit.get())
            sync_block()

    @staticmethod
    def _any_not_finite(words: Registers, dtype: str):
        found = [
            T.bitwise_and(words[i], T.uint32(exponent)) == T.uint32(exponent)
            for i in range(words.count)
            for exponent in _EXPONENTS[dtype]
        ]
        return functools.reduce(T.Or, found)

    def mark(self, tile, scores) -> None:
        """Make the scores of the positions that `begin_tile` noted NaN."""
        with T.If(self._is_careful), T.Then():
            words = Registers(-(-tile.tiling.positions // WARP), U32, "marked")
            for i in range(words.count):
                ptx("ld.shared.b32", words[i], tile.word_pointer(FIRST_WORD + i))

            def is_marked(column):
                word = words[0]
                if words.count > 1:
                    word = T.if_then_else(column < WARP, words[0], words[1])
                bit = T.shift_right(word, T.cast(T.truncmod(column, WARP), U32))
                return T.bitwise_and(bit, T.uint32(1)) != T.uint32(0)

            mark_scores(scores, lambda n, e: is_marked(tile.logits.column(n, e)))

    def end(self, tile) -> None:
        """Store finished rows, unless the block shall attend again, and their logs if it has not.

        `tile` stores them by `store_lse` and `store_rows`.
        """
        output, width = tile.softmax.output, tile.spec.v_head_dim
        lse, rows = tile.softmax.lse, tile.softmax.rows
        check = Registers(rows, F32, "check")
        check.fill(T.float32(0))
        # What is behind the columns of V may hold anything.
        with T.unroll(min(int(output.shape[0]), width // 8)) as n:
            for h in range(rows):
                for e in range(2):
                    value = output[n, h, e]
                    if tile.tiling.slices > 1:
                        is_column = tile.v_begin + n * 8 < width
                        value = T.if_then_else(is_column, value, T.float32(0))
                    # Adds 0, or NaN for what is not finite.
                    check[h] = fused_multiply_add(value, T.float32(0), check[h])
        # Rows whose logs are NaN are meant to be; a number compared with itself would be left out.
        is_wrong = [
            T.And(check[h] != T.float32(0), lse[h] < T.float32(LARGEST)) for h in range(rows)
        ]
        with T.If(self.mode.get() == _QUICK), T.Then():
            tile.store_lse()
        with T.If(functools.reduce(T.Or, is_wrong)), T.Then():
            ptx("st.shared.b32", tile.word_pointer(_NEEDED), T.uint32(1))
        sync_block()
        needed = Registers(1, U32, "needed")
        ptx("ld.shared.b32", needed[0], tile.word_pointer(_NEEDED))
        with T.If(T.And(self.mode.get() == _QUICK, needed[0] != T.uint32(0))):
            with T.Then():
                self.following.set(T.int32(_CAREFUL))
                sync_block()  # all have seen the word
            with T.Else():
                tile.store_rows()
