# SPDX-License-Identifier: Apache-2.0
"""Scores of single query rows by products of Q with the codes of K, as bytes.

Q becomes integers of 16 bits, each row with a scale of its own: an error is at most 1.6e-5 of the
row's largest value. K's scales multiply the sums of products, group by group.
"""

from tvm.script import tirx as T

from ...script import inline
from ..isa.bytes.byte_shuffles import INT32
from ..isa.bytes.two_bytes import TwoBytes
from ..isa.simd import F32, broadcast, constant, load, store, temp, vector_type
from .code_blocks import KBlocks
from .k_code_products import KCodeProducts

DWORDS = 4  # of rows of K that are multiplied between prefetches


@T.meta_class
class CodeScores(KCodeProducts):
    """As `RowProducts`, with scores from the codes of K, as bytes.

    Attributes
    ----------
    depth : int
        Dwords of a row of Q or of weights that a product takes.
    accumulators : int
        Sums that are in registers at once.
    """

    depth = 1
    rows_of_bytes = TwoBytes

    def _begin_k(self, blocks: KBlocks) -> None:
        """Allocate the rows of Q, which multiply `blocks`."""
        self.blocks, self.dots = blocks, blocks.dots
        self.accumulators = 16 if self.spec.target.registers >= 32 else 8
        num_rows = self.blocking.rows
        num_sets = self.rows.o.shape[0] // num_rows
        num_segments = blocks.k_rows.num_pieces * len(blocks.k_rows.halves)
        self.q = self.rows_of_bytes(
            self.dots,
            num_sets,
            num_rows,
            self.spec.qk_head_dim,
            blocks.k_rows.zero,
            num_segments=num_segments,
        )

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
    def _multiply_codes(self, kv):
        blocks = T.meta_var(self.blocks)
        for i in range((kv.count + self.blocks.positions - 1) // self.blocks.positions):
            position = kv.first + i * self.blocks.positions
            following = kv.following_first + i * self.blocks.positions
            prefetch = T.meta_var(blocks.prefetch_with(kv, position, following))
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
        if 2 * num_rows * num_halves <= self.accumulators:
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
        num_turns = T.meta_var(
            min(num_calls, self.dots.max_turns, max(1, self.accumulators // num_sums))
        )
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
                total = blocks.sum_of(self.dots.put_together(*bytes_), half)
                offset = q.offsets[blocks.k_rows.segment(piece, half), q.index(of_set, r)]
                total = T.cast(total + broadcast(offset, self.lanes), vector_type(F32, self.lanes))
                store(scores, (r, 0), self.lanes, load(scores, (r, 0), self.lanes) + total * scale)


def _sum(vectors, rows: range, lanes: int):
    """Add up some rows of int32 vectors."""
    value = load(vectors, (rows[0], 0), lanes, INT32)
    for row in rows[1:]:
        value = temp(value + load(vectors, (row, 0), lanes, INT32), lanes, INT32)
    return value
