# SPDX-License-Identifier: Apache-2.0
"""Products of single query rows with the codes of quantized K and V, as bytes.

The weights of each block become integers of 16 bits as Q does, times the scales of V: an error is
at most 1.6e-5 of the block's largest.
"""

from tvm.script import tirx as T

from ...layout import K_PLANE, V_PLANE
from ...script import inline
from ...spec import KernelSpec
from ..isa.bytes.byte_shuffles import INT32
from ..isa.simd import F32, broadcast, load, store, temp, vector_type
from .code_blocks import QUAD, CodeBlocks
from .code_scores import CodeScores
from .kv_blocks import BLOCK, KvBlocks
from .query_rows import QueryRows

MAX_VECTORS = 4  # of columns of O that are summed at once


@T.meta_class
class CodeProducts(CodeScores):
    """As `RowProducts`, for specs with `code_blocks.has_code_blocks`."""

    def __init__(self, spec: KernelSpec, ops, rows: QueryRows):
        super().__init__(spec, ops, rows)
        self._begin_k(CodeBlocks(spec))
        v_rows = self.blocks.v_rows
        num_rows = self.blocking.rows * len(v_rows.groups)
        self.weights = self.rows_of_bytes(self.dots, 1, num_rows, BLOCK, v_rows.zero)

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
        at_once = max(1, min(MAX_VECTORS, self.accumulators // (2 * self.blocking.rows)))
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
                total = blocks.sum_of(self.dots.put_together(*both), c // half_width)
                total = T.cast(
                    total + broadcast(weights.offsets[0, row], self.lanes),
                    vector_type(F32, self.lanes),
                )
                value = total * broadcast(weights.scale[row], self.lanes)
                before = load(o, (first_row + r, c * self.lanes), self.lanes) * broadcast(
                    decay, self.lanes
                )
                store(o, (first_row + r, c * self.lanes), self.lanes, before + value)
