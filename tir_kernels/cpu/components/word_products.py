# SPDX-License-Identifier: Apache-2.0
"""Products of single query rows with the codes of quantized K and V, as words (AVX2).

Q and the weights become integers of 16 bits, as in `code_products`, and codes are widened to words
where they are read: K row by row, V two rows at a time, so that a dword has a column of both. Codes
of 4 bits are unsigned there; what the 8 that is in each adds is subtracted where sums begin.
"""

from tvm.script import tirx as T

from ...layout import K_PLANE, V_PLANE
from ...script import inline
from ...spec import KernelSpec
from ...vectors import vector_type
from ..simd import F32, add, broadcast, constant, load, reduce_lanes, shuffle, store, temp
from ..words import INT32, LANES, RowWords, both_words, dot, integer
from .code_blocks import CodeRows, CodeScales
from .kv_blocks import BLOCK, KvBlocks
from .query_rows import QueryRows
from .row_products import RowProducts

CODES = 2 * LANES  # of a vector of words
POSITIONS = 16  # whose scales are taken at once
HALF = POSITIONS // 2  # between the two positions of a dword of V


def has_word_products(spec: KernelSpec) -> bool:
    """Whether decode multiplies the codes of a spec as words."""
    if spec.codec is None or not spec.target.has_word_dot or spec.qk_head_dim > 256:
        return False
    return all(
        each.is_integer and not each.has_bit_plane and CodeRows(spec, each).code_bytes % CODES == 0
        for each in (spec.codec.k, spec.codec.v)
    )


@T.meta_class
class WordProducts(RowProducts):
    """As `RowProducts`, for specs with `has_word_products`.

    K that is rotated here is no longer its codes, so `RowProducts` multiplies it.
    """

    def __init__(self, spec: KernelSpec, ops, rows: QueryRows):
        super().__init__(spec, ops, rows)
        self.scales = CodeScales(spec, POSITIONS)
        self.k_rows, self.v_rows = self.scales.k_rows, self.scales.v_rows
        num_rows, self.num_groups = self.blocking.rows, len(self.v_rows.groups)
        num_q = rows.o.shape[0]
        self.q = RowWords(num_q, spec.qk_head_dim)
        # What sums begin with: Q times the zero of the codes, negated.
        self.num_segments = self.k_rows.num_pieces * len(self.k_rows.halves)
        self.offsets = T.alloc_buffer((num_q, self.num_segments, LANES), INT32)
        self.weights = RowWords(num_rows * self.num_groups, BLOCK)
        self.weight_offsets = T.alloc_buffer((num_rows * self.num_groups,), INT32)

    @inline
    def begin_head(self, local_head):
        """Take the rows of Q of a local head as words."""
        padded = T.meta_var(self.blocking.padded_rows)
        for i in range(padded):
            row = local_head * padded + i
            self.q.set_row(row, lambda start: self._numbers_of_q(row, start))
            if self.k_rows.codec.is_packed:
                for segment in T.unroll(self.num_segments):
                    self._set_offset(row, segment)

    def _numbers_of_q(self, row, start: int) -> list:
        """Even and odd numbers of 16 of a row of Q."""
        both = [load(self.rows.q, (row, start + n), LANES) for n in (0, LANES)]
        return [shuffle(both, range(n, 2 * LANES, 2)) for n in range(2)]

    @inline
    def _set_offset(self, row, segment):
        per_segment = T.meta_var(self.spec.qk_head_dim // self.num_segments)
        total = T.alloc_local((LANES,), INT32)
        store(total, (0,), LANES, integer(0), INT32)
        for c in T.unroll(per_segment // CODES):
            q = T.meta_var(self.q.vector(row, (segment * per_segment + c * CODES) // 2))
            zeros = T.meta_var(both_words(-self.k_rows.zero))
            value = T.meta_var(dot(load(total, (0,), LANES, INT32), q, zeros))
            store(total, (0,), LANES, value, INT32)
        value = load(total, (0,), LANES, INT32)
        store(self.offsets, (row, segment, 0), LANES, value, INT32)

    @inline
    def multiply_q_k(self, kv: KvBlocks):
        """``S = Q K^T`` for a block of positions."""
        if self.rope.rotates_k:
            RowProducts.multiply_q_k(self, kv)
        else:
            self._multiply_codes(kv)

    @inline
    def _multiply_codes(self, kv):
        scales, count = T.meta_var((self.scales, self._positions_at_once()))
        num_steps = T.meta_var(POSITIONS // count)
        for i in range((kv.count + POSITIONS - 1) // POSITIONS):
            position = kv.first + i * POSITIONS
            following = kv.following_first + i * POSITIONS
            scales.prefetch_scales(kv.following, following, POSITIONS, K_PLANE)
            scales.prefetch_scales(kv.following, following, POSITIONS, V_PLANE)
            next_k = T.meta_var(scales.prefetcher(kv.following, following, K_PLANE))
            own_v = T.meta_var(scales.prefetcher(kv.rows, position, V_PLANE))
            soon_k = T.meta_var(scales.prefetcher(kv.rows, position + POSITIONS, K_PLANE))
            tile = kv.rows.tile(position, POSITIONS)
            scales.take_scales(tile.k, scales.k_scales, 0)
            for step in range(num_steps):
                next_k(step, num_steps)
                own_v(step, num_steps)
                soon_k(step, num_steps)
                for block in range(self.blocking.row_blocks):
                    self._score_codes(kv, tile, block, step * count, i * POSITIONS)
        for block in range(self.blocking.row_blocks):
            self._scale_scores(kv.local_head, block)

    def _positions_at_once(self) -> int:
        """Rows of K that are multiplied at once, so that the sums of all halves fit registers."""
        return max(1, self.blocking.positions // len(self.k_rows.halves))

    @inline
    def _score_codes(self, kv, tile, block, first, column):
        """Multiply a set of rows of Q with some positions of a tile, from `first` on."""
        num_rows, count = T.meta_var((self.blocking.rows, self._positions_at_once()))
        first_row = (kv.local_head * self.blocking.row_blocks + block) * num_rows
        halves = T.meta_var(self.k_rows.halves)
        scores = T.alloc_local((num_rows, count * LANES), F32)
        for r in T.unroll(num_rows):
            for t in T.unroll(count):
                store(scores, (r, t * LANES), LANES, constant(0.0, LANES))
        sums = T.alloc_local((len(halves) * num_rows * count, LANES), INT32)
        for piece in T.unroll(self.k_rows.num_pieces):
            self._begin_sums(sums, first_row, piece)
            for c in T.unroll(4 * self.k_rows.piece // CODES):
                self._add_codes(sums, tile, first, first_row, piece * 4 * self.k_rows.piece, c)
            self._add_piece(scores, sums, piece, first)
        self._store_scores(scores, block * num_rows, column + first, count)

    def _begin_sums(self, sums, first_row, piece: int) -> None:
        count = self._positions_at_once()
        for half in self.k_rows.halves:
            segment = self.k_rows.segment(piece, half)
            for r in range(self.blocking.rows):
                for t in range(count):
                    value = integer(0)
                    if self.k_rows.codec.is_packed:
                        value = load(self.offsets, (first_row + r, segment, 0), LANES, INT32)
                    store(sums, (self._sum(half, r, t), 0), LANES, value, INT32)

    def _sum(self, half: int, r: int, t: int) -> int:
        """Row of the sums of a half of the columns, a row of Q and a position."""
        return (half * self.blocking.rows + r) * self._positions_at_once() + t

    def _add_codes(self, sums, tile, first, first_row, begin, c) -> None:
        """Add the products with 16 bytes of codes of some positions."""
        for t in range(self._positions_at_once()):
            words = self._words(tile.k(first + t, 0), begin + c * CODES)
            for half, value in zip(self.k_rows.halves, words, strict=True):
                for r in range(self.blocking.rows):
                    column = half * self.k_rows.code_bytes + begin + c * CODES
                    q, at = self.q.vector(first_row + r, column // 2), (self._sum(half, r, t), 0)
                    total = load(sums, at, LANES, INT32)
                    store(sums, at, LANES, dot(total, value, q), INT32)

    def _words(self, element, begin) -> list:
        """16 bytes of codes of a row as words: of each half of the columns."""
        pages, (*row, _) = element
        return self._halves(self.k_rows, pages.codes[(*row, T.ramp(begin, 1, CODES))])

    @staticmethod
    def _halves(code_rows: CodeRows, codes) -> list:
        """16 bytes of codes as words: of each half of the columns they are of."""
        if not code_rows.has_halves:
            words = T.cast(codes, vector_type("int16", CODES))
            return [temp(T.reinterpret("int32x8", words), LANES, INT32)]
        words = temp(T.cast(codes, vector_type("uint16", CODES)), CODES, "uint16")
        low = T.bitwise_and(words, broadcast(T.uint16(15), CODES))
        high = T.shift_right(words, broadcast(T.uint16(4), CODES))
        return [temp(T.reinterpret("int32x8", x), LANES, INT32) for x in (low, high)]

    def _add_piece(self, scores, sums, piece, first) -> None:
        """Add the sums of a piece of the columns, times the scales of K."""
        for half in self.k_rows.halves:
            group = self.k_rows.group_of(piece, half)
            for t in range(self._positions_at_once()):
                scale = broadcast(temp(self.scales.k_scales[group, first + t]), LANES)
                for r in range(self.blocking.rows):
                    value = load(sums, (self._sum(half, r, t), 0), LANES, INT32)
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

    @inline
    def take_v(self, kv: KvBlocks):
        """Take the scales of V of a block of positions."""
        for i in range((kv.count + POSITIONS - 1) // POSITIONS):
            tile = kv.rows.tile(kv.first + i * POSITIONS, POSITIONS)
            self.scales.take_scales(tile.v, self.scales.v_scales, i * POSITIONS)
        if kv.hides_some:
            self.scales.hide(kv)

    @inline
    def add_weighted_v(self, kv: KvBlocks, block):
        """``O = O * rescale + P V`` for a set of rows."""
        num_rows, groups = T.meta_var((self.blocking.rows, self.num_groups))
        first_row = (kv.local_head * self.blocking.row_blocks + block) * num_rows
        for i in range(num_rows * groups):
            row, group = block * num_rows + i // groups, i % groups
            self.weights.set_row(i, lambda start: self._scaled_weights(row, group, start))
            if self.v_rows.codec.is_packed:
                self._set_weight_offset(i)
        halves = T.meta_var(len(self.v_rows.halves))
        width = T.meta_var(CODES // halves)  # bytes of a strip
        num_strips = T.meta_var(self.v_rows.code_bytes // width)
        for strip in range(num_strips):
            self._add_columns(kv, first_row, strip * width, width)

    def _scaled_weights(self, row, group, start: int) -> list:
        """Weights of a row times the scales of V: of 8 positions, and of those `HALF` later."""
        found = []
        for first in (start, start + HALF):
            weight = load(self.rows.weights, (row, first), LANES)
            found.append(weight * load(self.scales.v_scales, (group, first), LANES))
        return found

    def _set_weight_offset(self, row) -> None:
        total, zeros = integer(0), both_words(-self.v_rows.zero)
        for dword in range(0, BLOCK // 2, LANES):
            total = temp(dot(total, self.weights.vector(row, dword), zeros), LANES, INT32)
        store(self.weight_offsets, (row,), 1, reduce_lanes(total, LANES, add, INT32), INT32)

    @inline
    def _add_columns(self, kv, first_row, begin, width):
        """Add the products with the columns of some bytes of codes of a block's positions."""
        num_rows, halves = T.meta_var((self.blocking.rows, self.v_rows.halves))
        vectors = T.meta_var(width // LANES)
        sums = T.alloc_local((len(halves) * num_rows * vectors, LANES), INT32)
        self._begin_columns(sums, begin, vectors)
        for i in range((kv.count + POSITIONS - 1) // POSITIONS):
            tile = kv.rows.tile(kv.first + i * POSITIONS, POSITIONS)
            for t in T.unroll(HALF):
                self._add_pair(sums, tile, t, i * HALF + t, begin, width)
        self._put_columns(sums, first_row, begin, vectors)

    def _packed_row(self, r: int, half: int, begin):
        """Row of `weights` of a row, for the group of the columns of a byte of codes."""
        if self.num_groups == 1:
            return r
        column = half * self.v_rows.code_bytes + begin
        return r * self.num_groups + column * self.num_groups // self.spec.v_head_dim

    def _begin_columns(self, sums, begin, vectors: int) -> None:
        index = 0
        for half in self.v_rows.halves:
            for r in range(self.blocking.rows):
                value = integer(0)
                if self.v_rows.codec.is_packed:
                    offset = self.weight_offsets[self._packed_row(r, half, begin)]
                    value = broadcast(temp(offset, 1, INT32), LANES)
                for _ in range(vectors):
                    store(sums, (index, 0), LANES, value, INT32)
                    index += 1

    def _add_pair(self, sums, tile, t, dword, begin, width: int) -> None:
        """Add the products with positions `t` and ``t + HALF`` of a tile."""
        both = []
        for position in (t, t + HALF):
            pages, (*row, _) = tile.v(position, 0)
            dtype = str(pages.codes.dtype)
            both.append(temp(pages.codes[(*row, T.ramp(begin, 1, width))], width, dtype))
        for vector in range(width // LANES):
            columns = range(vector * LANES, (vector + 1) * LANES)
            codes = shuffle(both, [x for c in columns for x in (c, width + c)])
            words = self._halves(self.v_rows, temp(codes, CODES, dtype))
            for half, value in zip(self.v_rows.halves, words, strict=True):
                for r in range(self.blocking.rows):
                    row = self._packed_row(r, half, begin)
                    weight = broadcast(self.weights.words[row, dword], LANES)
                    at = ((half * self.blocking.rows + r) * (width // LANES) + vector, 0)
                    total = load(sums, at, LANES, INT32)
                    store(sums, at, LANES, dot(total, value, weight), INT32)

    def _put_columns(self, sums, first_row, begin, vectors: int) -> None:
        """Add sums of products to O, whose earlier sums decay."""
        o, index = self.rows.o, 0
        for half in self.v_rows.halves:
            for r in range(self.blocking.rows):
                decay = temp(self.rows.softmax.rescale[self.rows.state(first_row + r)])
                scale = temp(self.weights.scale[self._packed_row(r, half, begin)])
                for vector in range(vectors):
                    at = (first_row + r, half * self.v_rows.code_bytes + begin + vector * LANES)
                    total = T.cast(load(sums, (index, 0), LANES, INT32), "float32x8")
                    before = load(o, at, LANES) * broadcast(decay, LANES)
                    store(o, at, LANES, before + total * broadcast(scale, LANES))
                    index += 1
