# SPDX-License-Identifier: Apache-2.0
"""Products of single query rows with the codes of quantized K and V, as bytes.

Q, and the weights of each block times the scales of V, become integers of 16 bits, each row with a
scale of its own: an error is at most 1.6e-5 of the row's largest value. K's scales multiply the
sums of products, group by group.

A dword of transposed K has four columns of one position, and a vector has the same columns of a
position in each lane. A dword of V has one column of four positions, and a vector has a column in
each lane.
"""

from __future__ import annotations

from tvm.script import tirx as T

from ...layout import QuantizedPages
from ...script import inline
from ...spec import KernelSpec
from ..isa.bytes.dots import ByteDots
from ..isa.shuffles import INT32, interleave_bytes, transpose_dwords
from ..isa.simd import F32, broadcast, constant, load, shuffle, store, temp, vector_type
from ..pages.codes import load_unpacked
from .code_rows import CodeRows, CodeScales
from .kv_blocks import BLOCK, KvBlocks
from .local_rows import Blocking, max_local_rows
from .prefetch import CodePrefetch

STEP = 4  # dwords of rows of K that are multiplied between prefetches
QUAD = 4  # positions of a dword of V
MAX_VECTORS = 4  # of columns of O that are summed at once


def _max_sums(spec: KernelSpec) -> int:
    """Return how many vectors of sums are in registers at once."""
    return 16 if spec.target.registers >= 32 else 8


def _code_dwords(element: tuple, begin: int, num_dwords: int, lanes: int):
    """Bytes of codes of a row; the lanes of a vector that it does not fill repeat them."""
    pages, (*row, _) = element
    value = _codes(pages, row, begin, num_dwords)
    while num_dwords < lanes:
        value = temp(value, num_dwords, INT32)
        count, num_dwords = num_dwords, min(lanes, 2 * num_dwords)
        value = shuffle([value, value], [i % count for i in range(num_dwords)])
    return temp(value, lanes, INT32)


def _codes(pages: QuantizedPages, row: list, begin: int, num_dwords: int):
    if pages.codec.has_high_bits:
        return load_unpacked(pages, row, begin, 4 * num_dwords)
    codes = pages.codes[(*row, T.ramp(begin, 1, 4 * num_dwords))]
    return T.reinterpret(f"int32x{num_dwords}", codes)


@T.meta_class
class ByteQK:
    """Multiplies rows of Q with the codes of K.

    Parameters
    ----------
    spec : KernelSpec
    dots : ByteDots

    Attributes
    ----------
    positions : int
        Positions that are transposed at once: one in each lane.
    """

    def __init__(self, spec: KernelSpec, dots: ByteDots):
        self.dots, self.blocking, self.lanes = dots, Blocking.of(spec), spec.target.lanes
        self.positions, self.max_sums = dots.lanes, _max_sums(spec)
        self.rows = rows = CodeRows(spec, spec.codec.k, is_signed=dots.is_signed)
        self.scales = CodeScales(spec, len(rows.groups), self.positions, self.positions)
        self.prefetches = CodePrefetch(spec, self.positions)
        self.k = T.alloc_buffer((rows.code_bytes // 4, self.positions), INT32)
        self.q = dots.two_bytes(
            dots,
            max_local_rows(spec) // self.blocking.rows,
            self.blocking.rows,
            spec.qk_head_dim,
            rows.zero,
            num_segments=rows.num_pieces * len(rows.halves),
        )

    @inline
    def begin_head(self, q, local_head):
        """Take the rows of Q of a local head as bytes."""
        for row_set in range(self.blocking.row_sets):
            of_set = local_head * self.blocking.row_sets + row_set
            first_row = of_set * self.blocking.rows
            source = T.meta_var(lambda i, start: load(q, (first_row + i, start), self.lanes))
            self.q.set_rows(of_set, source)

    @inline
    def begin_block(self, kv: KvBlocks, k_offset):
        """K is not rotated."""

    @inline
    def multiply(self, q, kv: KvBlocks, scores):
        """``S = Q K^T`` for a local head and a block of positions."""
        for i in range((kv.count + self.positions - 1) // self.positions):
            position = kv.first + i * self.positions
            following = kv.next.first + i * self.positions
            prefetch = T.meta_var(self.prefetches.beside_k(kv, position, following))
            self._transpose(kv.rows.tile(position, self.positions))
            for row_set in range(self.blocking.row_sets):
                of_set = kv.local_head * self.blocking.row_sets + row_set
                first_row = T.meta_var(row_set * self.blocking.rows)
                self._multiply_tile(of_set, prefetch, scores, first_row, i * self.positions)

    def _transpose(self, tile) -> None:
        """Transpose the codes of a tile into `k`, and gather its scales."""
        num_bytes, code_bytes = 4 * self.positions, self.rows.code_bytes
        for begin in range(0, code_bytes, num_bytes):
            num_dwords = min(num_bytes, code_bytes - begin) // 4
            lines = [
                _code_dwords(tile.k(t, 0), begin, num_dwords, self.positions)
                for t in range(self.positions)
            ]
            for i, vector in enumerate(transpose_dwords(lines)[:num_dwords]):
                vector = self.rows.unsigned(vector, self.positions)
                store(self.k, (begin // 4 + i, 0), self.positions, vector, INT32)
        self.scales.gather(tile.k, 0)

    @inline
    def _multiply_tile(self, of_set, prefetch, scores, first_row, column):
        """Multiply a row set with the positions in `k`."""
        num_rows, num_halves = T.meta_var((self.blocking.rows, len(self.rows.halves)))
        sums = T.alloc_local((num_rows, self.lanes), F32)
        for r in T.unroll(num_rows):
            store(sums, (r, 0), self.lanes, constant(0.0, self.lanes))
        if 2 * num_rows * num_halves <= self.max_sums:
            self._multiply_halves(of_set, range(num_halves), prefetch, sums)
        else:  # the sums of all columns would not fit the registers
            self._multiply_halves(of_set, range(1), prefetch, sums)
            if num_halves == 2:
                self._multiply_halves(of_set, range(1, 2), None, sums)
        for r in T.unroll(num_rows):
            scale = T.meta_var(self.q.scale[self.q.index(of_set, r)])
            value = T.meta_var(load(sums, (r, 0), self.lanes) * broadcast(scale, self.lanes))
            store(scores, (first_row + r, column), self.lanes, value)

    @inline
    def _multiply_halves(self, of_set, halves, prefetch, sums):
        """Add the products of some halves of the columns, one group of scales after another."""
        k, num_sums = T.meta_var((self.rows, 2 * self.blocking.rows * len(halves)))
        num_steps = T.meta_var(k.piece // STEP)
        most_parts = T.meta_var(1 << (k.num_pieces * num_steps).bit_length() - 1)
        num_parts = T.meta_var(min(most_parts, self.positions // 2))
        # Several sets of sums in turn: one would wait for the latency of the dot product.
        num_calls = T.meta_var(STEP // self.dots.depth)
        num_turns = T.meta_var(
            min(num_calls, self.dots.max_turns, max(1, self.max_sums // num_sums))
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
                    dword = T.meta_var(piece * k.piece + step * STEP + d * self.dots.depth)
                    self._add_dwords(of_set, dword, halves, totals, d % num_turns * num_sums)
            self.dots.separate(totals)
            self._add_piece(totals, num_turns, of_set, piece, halves, sums)

    def _add_dwords(self, of_set, dword, halves: range, totals, first_sum) -> None:
        """Add the products of `depth` dwords of K in each half, of four columns each, and of Q."""
        dots, num_dwords, at = self.dots, self.rows.code_bytes // 4, first_sum
        codes = [self._half_vectors(dword + i, halves) for i in range(dots.depth)]
        right = [dots.right(list(vectors)) for vectors in zip(*codes, strict=True)]
        for r in range(self.blocking.rows):
            for half, operand in zip(halves, right, strict=True):
                for call in range(dots.calls):
                    left = dots.left(self.q, of_set, r, num_dwords * half + dword, call)
                    dots.add(totals, at, call, left, operand)
                at = at + 2

    def _half_vectors(self, dword, halves: range) -> list:
        """Some halves of the codes of a dword of all positions."""
        codes = temp(load(self.k, (dword, 0), self.lanes, INT32), self.lanes, INT32)
        return [temp(self.rows.half_of(codes, h, self.lanes), self.lanes, INT32) for h in halves]

    def _add_piece(self, totals, num_turns: int, of_set, piece, halves: range, sums) -> None:
        """Add the sums of a piece of the columns, times the scales of K."""
        rows, q, num_sums = self.rows, self.q, 2 * self.blocking.rows * len(halves)
        for h, half in enumerate(halves):
            scale = self.scales.vector(rows.group_of(piece, half), 0, self.lanes)
            scale = temp(scale, self.lanes)
            for r in range(self.blocking.rows):
                first = 2 * (r * len(halves) + h)
                of_bytes = (
                    _sum(totals, range(first + n, num_turns * num_sums, num_sums), self.lanes)
                    for n in range(2)
                )
                total = rows.sum_of(self.dots.put_together(*of_bytes), half, self.lanes)
                offset = q.offsets[rows.segment(piece, half), q.index(of_set, r)]
                total = T.cast(total + broadcast(offset, self.lanes), vector_type(F32, self.lanes))
                store(sums, (r, 0), self.lanes, load(sums, (r, 0), self.lanes) + total * scale)


def _sum(vectors, rows: range, lanes: int):
    """Add up some rows of int32 vectors."""
    value = load(vectors, (rows[0], 0), lanes, INT32)
    for row in rows[1:]:
        value = temp(value + load(vectors, (row, 0), lanes, INT32), lanes, INT32)
    return value


@T.meta_class
class BytePV:
    """Adds the codes of V, times weights that have taken in their scales, to rows of O.

    Parameters
    ----------
    spec : KernelSpec
    dots : ByteDots

    Attributes
    ----------
    v : int32 ``[quad, vector, column]``
        The codes of a block.
    """

    def __init__(self, spec: KernelSpec, dots: ByteDots):
        self.spec, self.dots, self.blocking = spec, dots, Blocking.of(spec)
        self.lanes, self.positions, self.max_sums = spec.target.lanes, dots.lanes, _max_sums(spec)
        self.rows = rows = CodeRows(spec, spec.codec.v, is_signed=dots.is_signed)
        self.num_groups = len(rows.groups)
        self.scales = CodeScales(spec, self.num_groups, self.positions, BLOCK)
        self.prefetches = CodePrefetch(spec, self.positions)
        self.v = T.alloc_buffer((BLOCK // QUAD, spec.v_head_dim // self.lanes, self.lanes), INT32)
        num_rows = self.blocking.rows * self.num_groups
        self.weights = dots.two_bytes(dots, 1, num_rows, BLOCK, rows.zero)

    @inline
    def load_v(self, kv: KvBlocks):
        """Bring the codes of V of a block of positions into order."""
        for i in range((kv.count + self.positions - 1) // self.positions):
            position = kv.first + i * self.positions
            self._interleave(kv.rows.tile(position, self.positions), i * self.positions)
        if kv.hides_some:
            self.scales.hide(kv)

    def _interleave(self, tile, column) -> None:
        """Take the codes of a tile into `v`, and gather its scales."""
        num_bytes, code_bytes = 4 * self.lanes, self.rows.code_bytes
        for t in range(0, self.positions, QUAD):
            quad = column // QUAD + t // QUAD
            for begin in range(0, code_bytes, num_bytes):
                num_dwords = min(num_bytes, code_bytes - begin) // 4
                lines = [
                    _code_dwords(tile.v(t + i, 0), begin, num_dwords, self.lanes)
                    for i in range(QUAD)
                ]
                vectors = interleave_bytes(lines, self.lanes)[: num_dwords * 4 // self.lanes]
                for i, vector in enumerate(vectors):
                    self._put_v(quad, begin // self.lanes + i, vector)
        self.scales.gather(tile.v, column)

    def _put_v(self, quad, vector: int, codes) -> None:
        """Keep the codes of some bytes of four rows."""
        codes = self.rows.unsigned(codes, self.lanes)
        for half in self.rows.halves:
            at = (quad, vector + half * (self.rows.code_bytes // self.lanes), 0)
            store(self.v, at, self.lanes, self.rows.half_of(codes, half, self.lanes), INT32)

    @inline
    def multiply(self, weights, kv: KvBlocks, o, rescale, row_set):
        """``O = O * rescale + P V`` for a row set."""
        num_rows = T.meta_var(self.blocking.rows)
        first_row = (kv.local_head * self.blocking.row_sets + row_set) * num_rows
        self.weights.set_rows(0, self._scaled(weights, row_set * num_rows))
        self._add_all_columns(kv, o, first_row, rescale)

    def _scaled(self, weights, first_row):
        """Return the weights of rows times the scales of V, group by group, for `TwoBytes`."""

        def scaled_weights(i, start):
            weight = load(weights, (first_row + i // self.num_groups, start), self.lanes)
            return weight * self.scales.vector(i % self.num_groups, start, self.lanes)

        return scaled_weights

    def _add_all_columns(self, kv, o, first_row, rescale) -> None:
        """Add the products with V to all columns of a row set, a few vectors at once."""
        num_vectors = self.spec.v_head_dim // self.lanes
        at_once = max(1, min(MAX_VECTORS, self.max_sums // (2 * self.blocking.rows)))
        num_turns = -(-num_vectors // at_once)
        num_parts = min(self.positions, 1 << num_turns.bit_length() - 1)
        for turn in range(num_turns):
            vectors = range(turn * at_once, min((turn + 1) * at_once, num_vectors))
            self._add_columns(kv, o, first_row, rescale, vectors, turn % num_parts, num_parts)

    @inline
    def _add_columns(self, kv, o, first_row, rescale, vectors, part, num_parts):
        """Add the products with some vectors of columns; prefetch a part of what comes next."""
        num_sums = T.meta_var(2 * self.blocking.rows * len(vectors))
        totals = T.alloc_local((num_sums, self.lanes), INT32)
        for i in T.unroll(num_sums):
            store(totals, (i, 0), self.lanes, broadcast(T.int32(0), self.lanes), INT32)
        per_product = T.meta_var(QUAD * self.dots.depth)  # positions
        step = T.meta_var(max(self.positions, per_product))
        for i in range((kv.count + step - 1) // step):
            following = kv.next.first + i * step
            self.prefetches.beside_v(kv, following, step, part, num_parts)
            for j in T.unroll(step // per_product):
                self._add_quads(i * (step // QUAD) + j * self.dots.depth, vectors, totals)
        self.dots.separate(totals)
        self._put_columns(totals, vectors, o, first_row, rescale)

    def _weights_row(self, r: int, vector: int) -> int:
        """Row of `weights` that has those of row `r` for the group of a vector of columns."""
        return r * self.num_groups + vector * self.lanes * self.num_groups // self.spec.v_head_dim

    def _add_quads(self, quad, vectors: range, totals) -> None:
        """Add the products with `depth` times four positions of V."""
        dots, right = self.dots, []
        for c in vectors:
            at = [(quad + i, c, 0) for i in range(dots.depth)]
            codes = [temp(load(self.v, i, self.lanes, INT32), self.lanes, INT32) for i in at]
            right.append(dots.right(codes))
        for r in range(self.blocking.rows):
            rows = [self._weights_row(r, c) for c in vectors]
            for call in range(dots.calls):
                left = {
                    row: temp(dots.left(self.weights, 0, row, quad, call), dots.left_lanes, INT32)
                    for row in sorted(set(rows))
                }
                for c, (row, operand) in enumerate(zip(rows, right, strict=True)):
                    dots.add(totals, 2 * (r * len(vectors) + c), call, left[row], operand)

    def _put_columns(self, totals, vectors: range, o, first_row, rescale) -> None:
        """Add sums of products to O, whose earlier sums decay."""
        weights, half_width = self.weights, self.rows.code_bytes // self.lanes
        for r in range(self.blocking.rows):
            factor = temp(rescale(first_row + r))
            for i, c in enumerate(vectors):
                row, at = weights.index(0, self._weights_row(r, c)), 2 * (r * len(vectors) + i)
                both = (load(totals, (at + n, 0), self.lanes, INT32) for n in range(2))
                total = self.dots.put_together(*both)
                total = self.rows.sum_of(total, c // half_width, self.lanes)
                total = T.cast(
                    total + broadcast(weights.offsets[0, row], self.lanes),
                    vector_type(F32, self.lanes),
                )
                value = total * broadcast(weights.scale[row], self.lanes)
                column = (first_row + r, c * self.lanes)
                before = load(o, column, self.lanes) * broadcast(factor, self.lanes)
                store(o, column, self.lanes, before + value)

    @inline
    def finish(self, o, num_heads):
        """Sums are in the order of the columns."""
