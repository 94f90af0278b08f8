# SPDX-License-Identifier: Apache-2.0
"""Products on tensor cores with operands that are widened from codes in registers.

`ldmatrix` takes pairs of bytes for elements of 16 bits. Of a row of K a thread gets four bytes side
by side, where an instruction wants two and two that are eight apart: any order of the columns will
do if Q has the same, so rows of Q are stored with their even columns before the odd ones of every
sixteen. Of V a thread gets two bytes of two rows each: what the columns of the sums are follows
from that, see `output_pair`.

With 4 bits a byte holds two elements that are half a row apart, and 32 columns share a scale: the
products of these columns are summed apart and multiplied by the scale, and the weights are
multiplied by the scales of V once for each group of columns.
"""

from __future__ import annotations

from tvm.script import tirx as T

from ...gpu.registers import U32
from ...gpu.scores.softmax import clear, products_of
from ...layout import K_PLANE, V_PLANE
from ...script import inline
from .codes import HIGH_HALVES, LOW_HALVES, permute, widen
from .group_scales import GroupScales
from .mma import LOAD, LOAD_TRANSPOSED, STEP, TensorCores, load_matrices

COLUMNS = 16  # whose codes are a step's


@inline
def interleave_columns(q, num_rows: int, threads):
    """Store the even columns of every sixteen before the odd ones."""
    num_items = T.meta_var(num_rows * (q.layout.chunks // 2))
    words = T.alloc_local((8,), U32, layout=None)
    for turn in T.serial(T.ceildiv(num_items, threads.num_threads)):
        item = turn * threads.num_threads + threads.thread
        if item < num_items:
            row = T.truncdiv(item, q.layout.chunks // 2)
            group = T.truncmod(item, q.layout.chunks // 2)
            low, high = T.meta_var([q.place(0, row, group * 2 + i) for i in range(2)])
            q.memory.load([words[j] for j in range(4)], low)
            q.memory.load([words[4 + j] for j in range(4)], high)
            q.memory.store(low, *_every_other(words, LOW_HALVES))
            q.memory.store(high, *_every_other(words, HIGH_HALVES))


def _every_other(words, half: int) -> list:
    return [permute(words[2 * j], words[2 * j + 1], half) for j in range(4)]


@T.meta_class
class CodeTensorCores(TensorCores):
    """Products of a warp with codes of 8 bits; scales are left to others.

    Parameters
    ----------
    tiling, q, warp_row, lane, how : see `TensorCores`
        `q` as `interleave_columns` leaves it.
    """

    steps_at_once = 2  # which have their codes in the same registers

    @inline
    def reorder_q(self, threads):
        """Give the columns of Q the order of codes, and wait for all threads."""
        interleave_columns(self.q, self.q.layout.rows, threads)
        self.q.isa.sync_block()

    def output_pair(self, o, n, h) -> tuple:
        """A column of the output and the sums of this one and the next, of row h."""
        pair, e = T.truncdiv(n, 2), T.truncmod(n, 2)
        column = pair * COLUMNS + T.truncmod(self.lane, 4) * 4 + e * 2
        return column, *(o[pair * 2 + side, h, e] for side in range(2))

    @inline
    def qk(self, scores, k, stage):
        """Compute the products of Q and the codes of K."""
        right = T.alloc_local((4,), U32, layout=None)
        clear(scores)
        start = self.k_start(k, stage)
        if self.keeps_q:
            for turn in T.unroll(self.num_steps // 2):
                self.add_steps(scores, k, start, right, turn, 2)
        else:
            for turn in T.serial(self.num_steps // 2):
                self.add_steps(scores, k, start, right, turn, 2)
        if self.num_steps % 2 == 1:
            self.add_steps(scores, k, start, right, self.num_steps // 2, 1)

    @inline
    def add_steps(self, scores, k, start, right, turn, num_steps):
        """Add the products of two steps, whose codes are side by side, or of the last one."""
        if not self.keeps_q:
            for i in T.unroll(num_steps):
                self.load_q(i, turn * 2 + i)
        for pair in T.unroll(scores.shape[0] // 2):
            load_matrices(LOAD, right, 0, k, k.beyond(start, pair * 16, turn * 2))
            for n in T.unroll(2):
                for i in T.unroll(num_steps):
                    place = T.meta_var(turn * 2 + i if self.keeps_q else i)
                    operand = T.meta_var(widen(self.codes.codec, self.dtype, right[n * 2 + i]))
                    self.multiply(scores, pair * 2 + n, self.q_operands, place, operand)

    @inline
    def pv(self, o, weights, v, stage):
        """Add the products of the weights and the codes of V."""
        right = T.alloc_local((4,), U32, layout=None)
        left = T.alloc_local((4 * self.row_tiles,), U32, layout=None)
        start = self.v_start(v, stage)
        num_chunks = T.meta_var(int(o.shape[0]) // 2)
        for step in T.unroll(weights.shape[0] // 2):
            self.pack_weights(left, weights, step)
            for pair in T.unroll(-(-num_chunks // 2)):
                place = T.meta_var(v.beyond(start, step * STEP, pair * 2))
                load_matrices(LOAD_TRANSPOSED, right, 0, v, place)
                self.add_columns(o, pair * 2, left, [right[0], right[1]])
                if num_chunks % 2 == 0 or pair * 2 + 1 < num_chunks:
                    self.add_columns(o, pair * 2 + 1, left, [right[2], right[3]])

    @inline
    def add_columns(self, o, chunk, left, words, side: int = 0):
        """Add the products with sixteen columns of V, whose codes are in two words."""
        codes = T.meta_var([widen(self.codes.codec, self.dtype, word, side) for word in words])
        self.multiply(o, chunk * 2, left, 0, [codes[0][0], codes[1][0]])
        self.multiply(o, chunk * 2 + 1, left, 0, [codes[0][1], codes[1][1]])


@T.meta_class
class PackedCodeTensorCores(CodeTensorCores):
    """Products of a warp with codes of 4 bits, and with the scales of their groups.

    Parameters
    ----------
    tiling, q, warp_row, lane, how : see `CodeTensorCores`
    scales : GroupScales
        Set before the first product.
    """

    steps_at_once = 1
    scales: GroupScales

    def place_of(self, step) -> tuple:
        """Return the chunk of a row and the side of its bytes that sixteen columns are."""
        num_chunks = self.codes.row_bytes // COLUMNS
        return T.truncmod(step, num_chunks), T.truncdiv(step, num_chunks)

    @property
    def num_loads(self) -> int:
        """Return the loads of two chunks that a row takes."""
        return -(-self.codes.row_bytes // (2 * COLUMNS))

    @inline
    def qk(self, scores, k, stage):
        """Compute ``Q K^T``."""
        words = T.alloc_local((4 * self.num_loads,), U32, layout=None)
        sums = T.meta_var(products_of(8, int(scores.shape[1])))
        scales = T.meta_var(self.scales.allocate(1))
        start = self.k_start(k, stage)
        if self.keeps_q:
            for pair in T.unroll(scores.shape[0] // 2):
                self.score_pair(scores, k, stage, start, words, sums, scales, pair)
        else:
            for pair in T.serial(scores.shape[0] // 2):
                self.score_pair(scores, k, stage, start, words, sums, scales, pair)

    @inline
    def score_pair(self, scores, k, stage, start, words, sums, scales, pair):
        """Compute the scores of sixteen positions."""
        for i in T.unroll(self.num_loads):
            load_matrices(LOAD, words, 4 * i, k, k.beyond(start, pair * 16, 2 * i))
        for n in T.unroll(2):
            tile = T.meta_var(pair * 2 + n)
            self.scales.load(scales, 0, K_PLANE, stage, tile)
            for h in T.unroll(scores.shape[1]):
                for e in T.unroll(2):
                    scores[tile, h, e] = T.float32(0)
            for group in T.unroll(len(self.codes.groups)):
                clear(sums)
                for i in T.unroll(2):
                    step = T.meta_var(2 * group + i)
                    chunk, side = T.meta_var(self.place_of(step))
                    if not self.keeps_q:
                        self.load_q(0, step)
                    word = T.meta_var(
                        words[T.truncdiv(chunk, 2) * 4 + n * 2 + T.truncmod(chunk, 2)]
                    )
                    operand = T.meta_var(widen(self.codes.codec, self.dtype, word, side))
                    self.multiply(sums, 0, self.q_operands, step if self.keeps_q else 0, operand)
                for e in T.unroll(2):
                    scale = self.scales.scale(scales, 0, e, group)
                    for h in T.unroll(scores.shape[1]):
                        scores[tile, h, e] += sums[0, h, e] * scale

    @inline
    def pv(self, o, weights, v, stage):
        """Add ``weights V``."""
        words = T.alloc_local((4 * self.num_loads,), U32, layout=None)
        left = T.alloc_local((4 * self.row_tiles,), U32, layout=None)
        scaled = T.meta_var(products_of(16, int(weights.shape[1])))
        scales = T.meta_var(self.scales.allocate(2))
        start = self.v_start(v, stage)
        self.scales.raise_top(weights, o, stage)
        factor = self.scales.range.factor()
        for step in T.unroll(weights.shape[0] // 2):
            for i in T.unroll(self.num_loads):
                place = T.meta_var(v.beyond(start, step * STEP, 2 * i))
                load_matrices(LOAD_TRANSPOSED, words, 4 * i, v, place)
            for n in T.unroll(2):
                self.scales.load(scales, n, V_PLANE, stage, step * 2 + n)
            for group in T.unroll(len(self.codes.groups)):
                for n in T.unroll(2):
                    for e in T.unroll(2):
                        scale = self.scales.scale(scales, n, e, group) * factor
                        for h in T.unroll(weights.shape[1]):
                            weight = T.meta_var(weights[step * 2 + n, h, e])
                            # The scale of a row that is hidden may be NaN; its weight stays 0.
                            scaled[n, h, e] = T.if_then_else(
                                weight > T.float32(0), weight * scale, T.float32(0)
                            )
                self.pack_weights(left, scaled, 0)
                for i in T.unroll(2):
                    chunk, side = T.meta_var(self.place_of(2 * group + i))
                    first = T.meta_var(T.truncdiv(chunk, 2) * 4 + T.truncmod(chunk, 2) * 2)
                    own = T.meta_var([words[first], words[first + 1]])
                    self.add_columns(o, 2 * group + i, left, own, side)
