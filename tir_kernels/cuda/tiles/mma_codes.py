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

from collections.abc import Callable

from tvm.script import tirx as T

from ..elements import pack
from ..emit import U32, Registers, index_temp, ptx
from ..scalars import temp
from .code_tiling import CodeTiling
from .codes import HIGH_HALVES, LOW_HALVES, permute, widen
from .group_scales import GroupScales
from .mma import LOAD, LOAD_TRANSPOSED, STEP, TensorCores, load_matrices
from .online_softmax import ROWS, Accumulators
from .shared_tiles import SharedTiles

COLUMNS = 16  # whose codes are a step's


def interleave_columns(q: SharedTiles, num_rows: int, threads) -> None:
    """Store the even columns of every sixteen before the odd ones."""
    groups = q.layout.chunks // 2
    items = num_rows * groups
    with T.serial(T.ceildiv(items, threads.num_threads)) as turn:
        item = index_temp(turn * threads.num_threads + threads.thread)
        with T.If(item < items), T.Then():
            row, group = (index_temp(f(item, groups)) for f in (T.truncdiv, T.truncmod))
            words = Registers(8, U32, "words")
            pointers = [q.pointer(0, row, group * 2 + i) for i in range(2)]
            for i, pointer in enumerate(pointers):
                ptx("ld.shared.v4.b32", *[words[4 * i + j] for j in range(4)], pointer)
            for pointer, half in zip(pointers, (LOW_HALVES, HIGH_HALVES), strict=True):
                pairs = [permute(words[2 * j], words[2 * j + 1], half) for j in range(4)]
                ptx("st.shared.v4.b32", pointer, *pairs)


class CodeTensorCores(TensorCores):
    """What a warp multiplies with codes of 8 bits; scales are left to others.

    Parameters
    ----------
    tiling, q, warp_row, lane, how : see `TensorCores`
        `q` as `interleave_columns` leaves it.
    """

    def __init__(self, tiling, q: SharedTiles, warp_row, lane, **how):
        super().__init__(tiling, q, warp_row, lane, **how)
        self.codes: CodeTiling = tiling.codes
        self.codec = tiling.codes.codec
        if not self.keeps_q:  # two steps have their codes in the same registers
            self.left = Registers(2 * 4 * self.row_tiles, U32, "q")

    def output_pair(self, output: Accumulators, n, h: int) -> tuple:
        """A column of the output and the sums of this one and the next, of row h."""
        pair, e = T.truncdiv(n, 2), T.truncmod(n, 2)
        column = pair * COLUMNS + T.truncmod(self.lane, 4) * 4 + e * 2
        return column, *(output[pair * 2 + side, h, e] for side in range(2))

    def _k_start(self, k: SharedTiles, stage):
        """Where two chunks of sixteen rows of K begin, for the thread."""
        row = T.truncmod(self.lane, 8) + T.truncdiv(self.lane, 16) * 8
        return k.start(stage, row, T.truncmod(T.truncdiv(self.lane, 8), 2))

    def scores(self, scores: Accumulators, k: SharedTiles, stage) -> None:
        """Compute the products of Q and the codes of K."""
        right = Registers(4, U32, "codes")
        scores.registers.fill(T.float32(0))
        start = self._k_start(k, stage)

        def multiply(turn, num_steps: int) -> None:
            places = [turn * 2 + i if self.keeps_q else i for i in range(num_steps)]
            if not self.keeps_q:
                for i in places:
                    self._load_q(i, turn * 2 + i)
            with T.unroll(scores.num_tiles // 2) as pair:
                load_matrices(LOAD, right, 0, k.beyond(start, pair * 16, turn * 2))
                for n in range(2):
                    for i, place in enumerate(places):
                        b = widen(self.codec, self.dtype, right[n * 2 + i])
                        self._multiply_by(scores, pair * 2 + n, self.left, place, b)

        loop = T.unroll if self.keeps_q else T.serial
        with loop(self.num_steps // 2) as turn:
            multiply(turn, 2)
        if self.num_steps % 2:
            multiply(self.num_steps // 2, 1)

    def _multiply_by(self, products: Accumulators, tile, a: Registers, place, b: list) -> None:
        """Add the products of all rows of a place in `a` with eight columns."""
        for m in range(self.row_tiles):
            d = [products[tile, ROWS * m + h, e] for h in range(ROWS) for e in range(2)]
            left = [a[(place * self.row_tiles + m) * 4 + i] for i in range(4)]
            ptx(self.instruction, *d, *left, *b, *d)

    def accumulate(
        self, output: Accumulators, weights: Accumulators, v: SharedTiles, stage
    ) -> None:
        """Add the products of the weights and the codes of V."""
        lane, right = self.lane, Registers(4, U32, "codes")
        left = Registers(4 * self.row_tiles, U32, "left")
        start = v.start(stage, T.truncmod(lane, 16), T.truncdiv(lane, 16))
        num_chunks = output.num_tiles // 2
        with T.unroll(weights.num_tiles // 2) as step:
            self._pack_weights(left, lambda row, n, e, step=step: weights[step * 2 + n, row, e])
            for chunk in range(num_chunks):
                if chunk % 2 == 0:
                    load_matrices(LOAD_TRANSPOSED, right, 0, v.beyond(start, step * STEP, chunk))
                words = [right[chunk % 2 * 2 + i] for i in range(2)]
                self._add_columns(output, chunk, left, words, 0)

    def _pack_weights(self, left: Registers, of: Callable) -> None:
        """Pack ``of(row, n, e)``, the weights of sixteen positions."""
        for m in range(self.row_tiles):
            for i in range(4):
                row = ROWS * m + i % 2
                pack(left[m * 4 + i], self.dtype, *(of(row, i // 2, e) for e in range(2)))

    def _add_columns(self, output, chunk: int, left, words: list, side: int) -> None:
        """Add the products with sixteen columns of V, whose codes are in two words."""
        low, high = (widen(self.codec, self.dtype, word, side) for word in words)
        for parity in range(2):
            self._multiply_by(output, chunk * 2 + parity, left, 0, [low[parity], high[parity]])


class PackedCodeTensorCores(CodeTensorCores):
    """What a warp multiplies with codes of 4 bits, and with the scales of their groups.

    Parameters
    ----------
    tiling, q, warp_row, lane, how : see `CodeTensorCores`
    scales : GroupScales
    """

    def __init__(self, tiling, q: SharedTiles, warp_row, lane, scales: GroupScales, **how):
        super().__init__(tiling, q, warp_row, lane, **how)
        self.scales = scales

    def _place_of(self, step: int) -> tuple[int, int]:
        """Chunk of a row and side of its bytes, of sixteen columns."""
        chunks = self.codes.row_bytes // COLUMNS
        return step % chunks, step // chunks

    def scores(self, scores: Accumulators, k: SharedTiles, stage) -> None:
        """Compute ``Q K^T``."""
        num_chunks, num_groups = self.codes.row_bytes // COLUMNS, len(self.codes.groups)
        words = Registers(4 * -(-num_chunks // 2), U32, "codes")
        sums = Accumulators(8, "group", scores.rows)
        start = self._k_start(k, stage)
        loop = T.unroll if self.keeps_q else T.serial
        with loop(scores.num_tiles // 2) as pair:
            for chunk in range(0, num_chunks, 2):
                load_matrices(LOAD, words, 2 * chunk, k.beyond(start, pair * 16, chunk))
            for n in range(2):
                tile = pair * 2 + n
                scales = self.scales.of_columns(0, stage, tile)
                for group in range(num_groups):
                    sums.registers.fill(T.float32(0))
                    for step in (2 * group, 2 * group + 1):
                        chunk, side = self._place_of(step)
                        word = words[chunk // 2 * 4 + n * 2 + chunk % 2]
                        b = widen(self.codec, self.dtype, word, side)
                        if not self.keeps_q:
                            self._load_q(0, step)
                        place = step if self.keeps_q else 0
                        self._multiply_by(sums, 0, self.left, place, b)
                    for h in range(scores.rows):
                        for e in range(2):
                            term = sums[0, h, e] * scales(e, group)
                            before = scores[tile, h, e] if group else T.float32(0)
                            scores[tile, h, e] = before + term

    def accumulate(
        self, output: Accumulators, weights: Accumulators, v: SharedTiles, stage
    ) -> None:
        """Add ``weights V``."""
        lane = self.lane
        num_chunks, num_groups = self.codes.row_bytes // COLUMNS, len(self.codes.groups)
        words = Registers(4 * -(-num_chunks // 2), U32, "codes")
        left = Registers(4 * self.row_tiles, U32, "left")
        start = v.start(stage, T.truncmod(lane, 16), T.truncdiv(lane, 16))
        factor = self.scales.raise_top(weights, output, stage)
        with T.unroll(weights.num_tiles // 2) as step:
            for chunk in range(0, num_chunks, 2):
                load_matrices(
                    LOAD_TRANSPOSED, words, 2 * chunk, v.beyond(start, step * STEP, chunk)
                )
            scales = [self.scales.of_columns(1, stage, step * 2 + i) for i in range(2)]
            for group in range(num_groups):
                of_group = [[temp(s(e, group) * factor) for e in range(2)] for s in scales]

                def scaled(row, n, e, step=step, of_group=of_group):
                    weight = weights[step * 2 + n, row, e]
                    product = weight * of_group[n][e]
                    return T.if_then_else(weight > T.float32(0), product, T.float32(0))

                self._pack_weights(left, scaled)
                for columns in (2 * group, 2 * group + 1):
                    chunk, side = self._place_of(columns)
                    own = [words[chunk // 2 * 4 + chunk % 2 * 2 + i] for i in range(2)]
                    self._add_columns(output, columns, left, own, side)
