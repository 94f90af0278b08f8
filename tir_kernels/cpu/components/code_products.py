# SPDX-License-Identifier: Apache-2.0
"""Products of single query rows with the codes of quantized K and V, as bytes.

Q and the weights become integers of 16 bits, each row with a scale of its own: for Q and for each
block of weights, times the scales of V. An error of Q is at most 1.6e-5 of the row's largest value,
one of a weight at most 1.6e-5 of the block's largest. K's scales multiply the sums of products,
group by group; V's are in the weights.
"""

from tvm.script import tirx as T

from ...layout import K_PLANE, V_PLANE
from ...script import inline
from ...spec import KernelSpec
from ..byte_dots import byte_dots
from ..byte_shuffles import INT32
from ..simd import F32, broadcast, constant, load, store, temp, vector_type
from ..two_bytes import TwoBytes, put_together
from .code_blocks import QUAD, CodeBlocks
from .kv_blocks import BLOCK, KvBlocks
from .query_rows import QueryRows
from .row_products import RowProducts

ACCUMULATORS = 16  # sums that are in registers at once
MAX_VECTORS = 4  # of columns of O that are summed at once
DWORDS = 4  # of rows of K that are multiplied between prefetches


@T.meta_class
class CodeProducts(RowProducts):
    """As `RowProducts`, for specs with `code_blocks.has_code_blocks`.

    K that is rotated here is no longer its codes, so `RowProducts` multiplies it.

    Attributes
    ----------
    depth : int
        Dwords of a row of Q or of weights that a product takes.
    """

    depth = 1
    rows_of_bytes = TwoBytes

    def __init__(self, spec: KernelSpec, ops, rows: QueryRows):
        super().__init__(spec, ops, rows)
        blocks = self.blocks = CodeBlocks(spec)
        dots = self.dots = byte_dots(spec.target)
        num_rows, num_groups = self.blocking.rows, len(blocks.v_rows.groups)
        num_sets = rows.o.shape[0] // num_rows
        num_segments = blocks.k_rows.num_pieces * len(blocks.k_rows.halves)
        zeros = blocks.k_rows.zero, blocks.v_rows.zero
        self.q = self.rows_of_bytes(
            dots, num_sets, num_rows, spec.qk_head_dim, zeros[0], num_segments=num_segments
        )
        self.weights = self.rows_of_bytes(dots, 1, num_rows * num_groups, BLOCK, zeros[1])

    @inline
    def begin_head(self, local_head):
        """Take the rows of Q of a local head as bytes."""
        for block in range(self.blocking.row_blocks):
            of_set = local_head * self.blocking.row_blocks + block
            first_row = of_set * self.blocking.rows
            source = T.meta_var(
                lambda i, start: load(self.rows.q, (first_row + i, start), self.lanes)
            )
            self.q.set_rows(of_set, source)

    @inline
    def multiply_q_k(self, kv: KvBlocks):
        """``S = Q K^T`` for a block of positions."""
        if self.rope.rotates_k:
            RowProducts.multiply_q_k(self, kv)
        else:
            self._multiply_codes(kv)

    @inline
    def _multiply_codes(self, kv):
        blocks = T.meta_var(self.blocks)
        for i in range((kv.count + self.blocks.positions - 1) // self.blocks.positions):
            position = kv.first + i * self.blocks.positions
            following = kv.following_first + i * self.blocks.positions
            blocks.prefetch_scales(kv.following, following, self.blocks.positions, K_PLANE)
            blocks.prefetch_scales(kv.following, following, self.blocks.positions, V_PLANE)
            next_k = T.meta_var(blocks.prefetcher(kv.following, following, K_PLANE))
            own_v = T.meta_var(blocks.prefetcher(kv.rows, position, V_PLANE))
            soon_k = T.meta_var(
                blocks.prefetcher(kv.rows, position + self.blocks.positions, K_PLANE)
            )

            @inline
            def prefetch(part, num_parts):
                next_k(part, num_parts)
                own_v(part, num_parts)
                soon_k(part, num_parts)

            blocks.take_k(kv.rows, position)
            for block in range(self.blocking.row_blocks):
                of_set = kv.local_head * self.blocking.row_blocks + block
                self._score_codes(
                    of_set, block * self.blocking.rows, i * self.blocks.positions, prefetch
                )

    @inline
    def _score_codes(self, of_set, first_row, column, prefetch):
        """Multiply a set of rows of Q with the positions in `blocks`."""
        num_rows, num_halves = T.meta_var((self.blocking.rows, len(self.blocks.k_rows.halves)))
        scores = T.alloc_local((num_rows, self.lanes), F32)
        for r in T.unroll(num_rows):
            store(scores, (r, 0), self.lanes, constant(0.0, self.lanes))
        if 2 * num_rows * num_halves <= ACCUMULATORS:
            self._add_scores(scores, of_set, range(num_halves), prefetch)
        else:  # the sums of all columns would not fit the registers
            self._add_scores(scores, of_set, range(1), prefetch)
            if num_halves == 2:
                self._add_scores(scores, of_set, range(1, 2), None)
        for r in T.unroll(num_rows):
            scale = T.meta_var(self.q.scale[self.q.index(of_set, r)])
            value = T.meta_var(load(scores, (r, 0), self.lanes) * broadcast(scale, self.lanes))
            store(self.rows.scores, (first_row + r, column), self.lanes, value)

    @inline
    def _add_scores(self, scores, of_set, halves, prefetch):
        """Add the products of some halves of the columns, one group of scales after another."""
        k, num_sums = T.meta_var((self.blocks.k_rows, 2 * self.blocking.rows * len(halves)))
        num_steps = T.meta_var(k.piece // DWORDS)
        most_parts = T.meta_var(1 << (k.num_pieces * num_steps).bit_length() - 1)
        num_parts = T.meta_var(min(most_parts, self.blocks.positions // 2))
        # Several sets of sums in turn: one would wait for the latency of the dot product.
        num_calls = T.meta_var(DWORDS // self.depth)
        num_turns = T.meta_var(min(num_calls, max(1, ACCUMULATORS // num_sums)))
        for piece in range(k.num_pieces):
            totals = T.alloc_local((num_turns * num_sums, self.lanes), INT32)
            for i in T.unroll(num_turns * num_sums):
                store(totals, (i, 0), self.lanes, broadcast(T.int32(0), self.lanes), INT32)
            for step in range(num_steps):
                if prefetch is not None:
                    part = (piece * num_steps + step) % num_parts
                    prefetch(part, num_parts)
                for d in T.unroll(num_calls):
                    dword = T.meta_var(piece * k.piece + step * DWORDS + d * self.depth)
                    first_sum = T.meta_var(d % num_turns * num_sums)
                    self._add_dwords(totals, first_sum, of_set, dword, halves)
            self._separate(totals)
            self._add_piece(scores, totals, num_turns, of_set, piece, halves)

    def _separate(self, totals) -> None:
        """Bring the sums of high and of low bytes apart: they are."""

    def _add_dwords(self, totals, first_sum, of_set, dword, halves: range) -> None:
        """Add the products of `depth` dwords of K in each half, of four columns each, and of Q."""
        num_dwords, index = self.blocks.k_rows.code_bytes // 4, first_sum
        codes = self.blocks.k_vectors(dword, halves)
        for r in range(self.blocking.rows):
            for half, value in zip(halves, codes, strict=True):
                for n in range(2):
                    q = self.q.dword(of_set, r, n, num_dwords * half + dword)
                    total = load(totals, (index, 0), self.lanes, INT32)
                    store(totals, (index, 0), self.lanes, self.dots.dot(total, value, q), INT32)
                    index = index + 1

    def _add_piece(self, scores, totals, num_turns: int, of_set, piece, halves: range) -> None:
        """Add the sums of a piece of the columns, times the scales of K."""
        blocks, q = self.blocks, self.q
        num_sums = 2 * self.blocking.rows * len(halves)
        for h, half in enumerate(halves):
            at = (blocks.k_rows.group_of(piece, half), 0)
            scale = temp(load(blocks.k_scales, at, self.lanes), self.lanes)
            for r in range(self.blocking.rows):
                first = 2 * (r * len(halves) + h)
                bytes_ = (
                    _sum(totals, range(first + n, num_turns * num_sums, num_sums), self.lanes)
                    for n in range(2)
                )
                total = blocks.sum_of(put_together(*bytes_, self.lanes), half)
                offset = q.offsets[blocks.k_rows.segment(piece, half), q.index(of_set, r)]
                total = T.cast(total + broadcast(offset, self.lanes), vector_type(F32, self.lanes))
                store(scores, (r, 0), self.lanes, load(scores, (r, 0), self.lanes) + total * scale)

    @inline
    def take_v(self, kv: KvBlocks):
        """Take the codes of V of a block of positions."""
        for i in range((kv.count + self.blocks.positions - 1) // self.blocks.positions):
            position = kv.first + i * self.blocks.positions
            self.blocks.take_v(kv.rows, position, i * self.blocks.positions)
        if kv.hides_some:
            self.blocks.hide(kv)

    @inline
    def add_weighted_v(self, kv: KvBlocks, block):
        """``O = O * rescale + P V`` for a set of rows."""
        first_row = (kv.local_head * self.blocking.row_blocks + block) * self.blocking.rows
        self.weights.set_rows(0, self._scaled_weights(block * self.blocking.rows))
        self._add_strips(kv, first_row)

    def _scaled_weights(self, first_row):
        """Return the weights of rows times the scales of V, group by group, for `TwoBytes`."""
        num_groups = len(self.blocks.v_rows.groups)

        def weights(i, start):
            weight = load(self.rows.weights, (first_row + i // num_groups, start), self.lanes)
            return weight * load(self.blocks.v_scales, (i % num_groups, start), self.lanes)

        return weights

    def _add_strips(self, kv, first_row) -> None:
        """Add the products with V to all columns of a set of rows, a few vectors at once."""
        num_vectors = self.spec.v_head_dim // self.lanes
        at_once = max(1, min(MAX_VECTORS, ACCUMULATORS // (2 * self.blocking.rows)))
        num_strips = -(-num_vectors // at_once)
        num_parts = min(self.blocks.positions, 1 << num_strips.bit_length() - 1)
        for strip in range(num_strips):
            vectors = range(strip * at_once, min((strip + 1) * at_once, num_vectors))
            self._add_columns(kv, first_row, vectors, strip % num_parts, num_parts)

    @inline
    def _add_columns(self, kv, first_row, vectors, part, num_parts):
        """Add the products with some vectors of columns; prefetch a part of what comes next."""
        blocks, num_sums = T.meta_var((self.blocks, 2 * self.blocking.rows * len(vectors)))
        totals = T.alloc_local((num_sums, self.lanes), INT32)
        for i in T.unroll(num_sums):
            store(totals, (i, 0), self.lanes, broadcast(T.int32(0), self.lanes), INT32)
        per_product = T.meta_var(QUAD * self.depth)  # positions
        step = T.meta_var(max(blocks.positions, per_product))
        for i in range((kv.count + step - 1) // step):
            following = kv.following_first + i * step
            self._prefetch_following(kv, following, step, part, num_parts)
            for j in T.unroll(step // per_product):
                self._add_quads(totals, i * (step // QUAD) + j * self.depth, vectors)
        self._separate(totals)
        self._put_columns(totals, first_row, vectors)

    def _prefetch_following(self, kv, following, count: int, part, num_parts: int) -> None:
        """Prefetch a part of the `count` positions that come next."""
        for first in range(0, count, self.blocks.positions):
            for plane in (V_PLANE, K_PLANE):
                prefetch = self.blocks.prefetcher(kv.following, following + first, plane)
                prefetch(part, num_parts)

    def _packed_row(self, r: int, vector: int) -> int:
        """Row of `weights` that has those of row `r` for the group of a vector of columns."""
        num_groups = len(self.blocks.v_rows.groups)
        return r * num_groups + vector * self.lanes * num_groups // self.spec.v_head_dim

    def _add_quads(self, totals, quad, vectors: range) -> None:
        """Add the products with `depth` times four positions of V."""
        codes = [
            temp(load(self.blocks.v, (quad, c, 0), self.lanes, INT32), self.lanes, INT32)
            for c in vectors
        ]
        for r in range(self.blocking.rows):
            packed_rows = [self._packed_row(r, c) for c in vectors]
            for n in range(2):
                dwords = {
                    row: temp(self.weights.dword(0, row, n, quad), 1, INT32)
                    for row in sorted(set(packed_rows))
                }
                for c, (row, value) in enumerate(zip(packed_rows, codes, strict=True)):
                    at = (2 * (r * len(vectors) + c) + n, 0)
                    total = load(totals, at, self.lanes, INT32)
                    store(totals, at, self.lanes, self.dots.dot(total, value, dwords[row]), INT32)

    def _put_columns(self, totals, first_row, vectors: range) -> None:
        """Add sums of products to O, whose earlier sums decay."""
        blocks, weights, o = self.blocks, self.weights, self.rows.o
        half_width = blocks.v_rows.code_bytes // self.lanes
        for r in range(self.blocking.rows):
            decay = temp(self.rows.softmax.rescale[self.rows.state(first_row + r)])
            for i, c in enumerate(vectors):
                row, at = weights.index(0, self._packed_row(r, c)), 2 * (r * len(vectors) + i)
                both = (load(totals, (at + n, 0), self.lanes, INT32) for n in range(2))
                total = blocks.sum_of(put_together(*both, self.lanes), c // half_width)
                total = T.cast(
                    total + broadcast(weights.offsets[0, row], self.lanes),
                    vector_type(F32, self.lanes),
                )
                value = total * broadcast(weights.scale[row], self.lanes)
                before = load(o, (first_row + r, c * self.lanes), self.lanes) * broadcast(
                    decay, self.lanes
                )
                store(o, (first_row + r, c * self.lanes), self.lanes, before + value)


def _sum(vectors, rows: range, lanes: int):
    """Add up some rows of int32 vectors."""
    value = load(vectors, (rows[0], 0), lanes, INT32)
    for row in rows[1:]:
        value = temp(value + load(vectors, (row, 0), lanes, INT32), lanes, INT32)
    return value
