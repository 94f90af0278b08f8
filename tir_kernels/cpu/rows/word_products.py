# SPDX-License-Identifier: Apache-2.0
"""Products of single query rows with the codes of quantized K and V on AVX2.

Q and the weights become integers of 16 bits, as in `code_products`. Codes of 8 bits are widened to
words where they are read (`vpmaddwd`). K in 4 bits is multiplied as bytes, by the high and by the
low bytes of Q (`vpmaddubsw`): its sums fit 16 bits, so twice as many codes share an instruction.
"""

from tvm.script import tirx as T

from ...script import inline
from ...spec import KernelSpec
from ..isa.bytes.byte_pairs import BytePairs, VectorBytes
from ..isa.bytes.words import INT32, LANES, RowWords, dot, integer
from ..isa.simd import F32, broadcast, constant, load, shuffle, store, temp
from .code_blocks import CodeRows, CodeScales, KBlocks
from .code_scores import CodeScores
from .k_code_products import KCodeProducts
from .kv_blocks import BLOCK
from .query_rows import QueryRows
from .word_values import CODES, POSITIONS, WORDS, WordValues


def has_word_products(spec: KernelSpec) -> bool:
    """Whether decode multiplies the codes of a spec as words."""
    if spec.codec is None or not spec.target.has_word_dot or spec.qk_head_dim > 256:
        return False
    return all(
        each.is_integer and not each.has_bit_plane and CodeRows(spec, each).code_bytes % CODES == 0
        for each in (spec.codec.k, spec.codec.v)
    )


def word_products_of(spec: KernelSpec) -> type:
    """Return the class of products for a spec with `has_word_products`."""
    return PackedWordProducts if spec.codec.k.is_packed else WordProducts


@T.meta_class
class PackedWordProducts(CodeScores, WordValues):
    """As `WordProducts`, for K in 4 bits."""

    rows_of_bytes = VectorBytes

    def __init__(self, spec: KernelSpec, ops, rows: QueryRows):
        super().__init__(spec, ops, rows)
        self._begin_k(KBlocks(spec, BytePairs()))
        self._begin_v(self.blocks)


@T.meta_class
class WordProducts(KCodeProducts, WordValues):
    """As `RowProducts`, for specs with `has_word_products` and K in 8 bits."""

    def __init__(self, spec: KernelSpec, ops, rows: QueryRows):
        super().__init__(spec, ops, rows)
        scales = CodeScales(spec, POSITIONS)
        self.k_rows = scales.k_rows
        self.q = RowWords(rows.o.shape[0], spec.qk_head_dim)
        self._begin_v(scales)

    @inline
    def begin_head(self, local_head):
        """Take the rows of Q of a local head as words."""
        padded = T.meta_var(self.blocking.padded_rows)
        for i in range(padded):
            row = local_head * padded + i
            self.q.set_rows(row, 1, lambda _, start: self._numbers_of_q(row, start))

    def _numbers_of_q(self, row, start: int) -> list:
        """Even and odd numbers of 16 of a row of Q."""
        both = [load(self.rows.q, (row, start + n), LANES) for n in (0, LANES)]
        return [shuffle(both, range(n, 2 * LANES, 2)) for n in range(2)]

    @inline
    def _multiply_codes(self, kv):
        scales, count = T.meta_var((self.scales, self.blocking.positions))
        num_steps = T.meta_var(POSITIONS // count)
        for i in range((kv.count + POSITIONS - 1) // POSITIONS):
            position = kv.first + i * POSITIONS
            following = kv.following_first + i * POSITIONS
            prefetch = T.meta_var(scales.prefetch_with(kv, position, following))
            tile = kv.rows.tile(position, POSITIONS)
            scales.take_scales(tile.k, scales.k_scales, 0)
            for step in range(num_steps):
                prefetch(step, num_steps)
                for block in range(self.blocking.row_blocks):
                    self._score_codes(kv, tile, block, step * count, i * POSITIONS)
        for block in range(self.blocking.row_blocks):
            self._scale_scores(kv.local_head, block)

    @inline
    def _score_codes(self, kv, tile, block, first, column):
        """Multiply a set of rows of Q with some positions of a tile, from `first` on."""
        num_rows, count = T.meta_var((self.blocking.rows, self.blocking.positions))
        first_row = (kv.local_head * self.blocking.row_blocks + block) * num_rows
        scores = T.alloc_local((num_rows, count * LANES), F32)
        for r in T.unroll(num_rows):
            for t in T.unroll(count):
                store(scores, (r, t * LANES), LANES, constant(0.0, LANES))
        sums = T.alloc_local((num_rows * count, LANES), INT32)
        columns = T.meta_var(4 * self.k_rows.piece)
        for piece in T.unroll(self.k_rows.num_pieces):
            for i in T.unroll(num_rows * count):
                store(sums, (i, 0), LANES, integer(0), INT32)
            for c in T.unroll(columns // CODES):
                self._add_codes(sums, tile, first, first_row, piece * columns + c * CODES)
            self._add_piece(scores, sums, piece, first)
        self._store_scores(scores, block * num_rows, column + first, count)

    def _add_codes(self, sums, tile, first, first_row, column) -> None:
        """Add the products with 16 columns of some positions."""
        for t in range(self.blocking.positions):
            pages, (*row, _) = tile.k(first + t, 0)
            codes = T.cast(pages.codes[(*row, T.ramp(column, 1, CODES))], WORDS)
            words = temp(T.reinterpret("int32x8", codes), LANES, INT32)
            for r in range(self.blocking.rows):
                q, at = self.q.vector(first_row + r, column // 2), (self._sum(r, t), 0)
                total = load(sums, at, LANES, INT32)
                store(sums, at, LANES, dot(total, words, q), INT32)

    def _sum(self, r: int, t: int) -> int:
        """Row of the sums of a row of Q and a position."""
        return r * self.blocking.positions + t

    def _add_piece(self, scores, sums, piece, first) -> None:
        """Add the sums of a piece of the columns, times the scales of K."""
        group = self.k_rows.group_of(piece, 0)
        for t in range(self.blocking.positions):
            scale = broadcast(temp(self.scales.k_scales[group, first + t]), LANES)
            for r in range(self.blocking.rows):
                value = load(sums, (self._sum(r, t), 0), LANES, INT32)
                at = (r, t * LANES)
                total = load(scores, at, LANES) + T.cast(value, "float32x8") * scale
                store(scores, at, LANES, total)

    @inline
    def _scale_scores(self, local_head, block):
        """Multiply scores with the scales of the rows of Q."""
        num_rows = T.meta_var(self.blocking.rows)
        for r in range(num_rows):
            row = (local_head * self.blocking.row_blocks + block) * num_rows + r
            scale = self.q.scale[row]
            for c in T.unroll(BLOCK // LANES):
                at = T.meta_var((block * num_rows + r, c * LANES))
                value = T.meta_var(load(self.rows.scores, at, LANES) * broadcast(scale, LANES))
                store(self.rows.scores, at, LANES, value)
