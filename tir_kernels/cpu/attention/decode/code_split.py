# SPDX-License-Identifier: Apache-2.0
"""A decode split over quantized pages, whose codes are multiplied themselves, as bytes.

Q and the weights become integers of 16 bits, each row with a scale of its own: for Q and for each
block of weights, times the scales of V. An error of Q is at most 1.6e-5 of the row's largest value,
one of a weight at most 1.6e-5 of the block's largest. K's scales multiply the sums of products,
group by group; V's are in the weights.
"""

from __future__ import annotations

from contextlib import nullcontext

from tvm.script import tirx as T

from ....layout import K_PLANE, V_PLANE
from ....spec import KernelSpec
from ... import vnni
from ...simd import (
    Register,
    add,
    broadcast,
    chunks,
    constant,
    index_temp,
    load,
    reduce_lanes,
    shuffle,
    store,
    temp,
)
from ...vnni import INT32, LANES, TwoBytes, add_dots, add_vector_dots, integer, put_together
from .blocking import BLOCK, DecodeStep
from .code_blocks import POSITIONS, QUAD, CodeBlocks, has_code_blocks
from .split import DecodeSplit

VECTORS = 2  # of columns of O that are summed at once
DWORDS = 4  # of rows of K that are multiplied between prefetches


class CodeSplit(DecodeSplit):
    """As `DecodeSplit`, for specs with `code_blocks.has_code_blocks`."""

    def __init__(self, spec: KernelSpec, ops, sm_scale, num_local_heads: int = 1):
        super().__init__(spec, ops, sm_scale, num_local_heads)
        self.blocks = CodeBlocks(spec)
        num_rows, self.num_groups = self.blocking.padded_rows, len(self.blocks.groups)
        self.q_bytes = TwoBytes(num_local_heads * num_rows, spec.qk_head_dim)
        # The code of zero times the sum of the numbers of a row in a group.
        self.q_zeros = T.alloc_buffer((num_local_heads * num_rows, self.num_groups), INT32)
        self.weight_bytes = TwoBytes(num_rows * self.num_groups, BLOCK)

    def start(self, a, sequence, head, local_head=0) -> None:
        """Take the query rows of a KV head and clear its sums."""
        super().start(a, sequence, head, local_head)
        base = index_temp(local_head * self.blocking.padded_rows)
        with T.serial(self.blocking.padded_rows) as i:
            row = index_temp(base + i)
            self.q_bytes.set_rows(row, 1, lambda _, start: load(self.q, (row, start), LANES))
            for group, (begin, end) in enumerate(self.blocks.groups):
                T.buffer_store(self.q_zeros, self._zeros(row, begin, end), [row, group])

    def _zeros(self, row, begin: int, end: int):
        """The products of columns of a row of Q with codes of zero: int32."""
        totals = [Register(LANES, INT32, integer(0)) for _ in range(2)]
        zero = self.blocks.zero * 0x01010101
        zero = integer(zero - (zero >> 31 << 32))
        for start, count in chunks((end - begin) // 4, LANES):
            for n, total in enumerate(totals):
                lanes = count
                value = load(self.q_bytes.dwords, (row, n, begin // 4 + start), lanes, INT32)
                while lanes < LANES:
                    value = shuffle([value, broadcast(T.int32(0), lanes)], range(2 * lanes))
                    lanes *= 2
                    value = temp(value, lanes, INT32)
                add_vector_dots(total, zero, value)
        return reduce_lanes(put_together(*(t.get() for t in totals)), LANES, add, INT32)

    def step(self, a, step: DecodeStep, k_offset) -> None:
        """Attend to a block of positions with one local head."""
        a.rope.either(
            lambda: self.scores.block(a, step, k_offset),  # rotates what the codes stand for
            lambda: self._score(step),
        )
        self.mask(a, step, k_offset)
        with T.serial((step.count + POSITIONS - 1) // POSITIONS) as i:
            column = index_temp(i * POSITIONS)
            self.blocks.take_v(step.rows, index_temp(step.first + column), column)
        with T.If(self.is_partial(step)), T.Then():
            self.blocks.hide(step.count, step.before)
        self.for_row_blocks(step.local_head, lambda *block: self.attend(step, *block))

    def _score(self, step: DecodeStep) -> None:
        """Multiply the rows of Q with a block of K."""
        blocks = self.blocks
        with T.serial((step.count + POSITIONS - 1) // POSITIONS) as i:
            column = index_temp(i * POSITIONS)
            position = index_temp(step.first + column)
            following = index_temp(step.following_first + column)
            blocks.prefetch_scales(step.following, following, POSITIONS, K_PLANE)
            blocks.prefetch_scales(step.following, following, POSITIONS, V_PLANE)
            prefetchers = (
                blocks.prefetcher(step.following, following, K_PLANE),
                blocks.prefetcher(step.rows, position, V_PLANE),
                blocks.prefetcher(step.rows, position + POSITIONS, K_PLANE),
            )
            blocks.take_k(step.rows, position)
            self.for_row_blocks(
                step.local_head,
                lambda _, first_row, row: self._score_rows(first_row, row, column, prefetchers),
            )

    def _score_rows(self, first_row, weights_row, column, prefetchers) -> None:
        """The scores of one set of rows for the positions in `blocks`."""
        rows = range(self.blocking.rows)
        scores = [Register(LANES, init=constant(0.0, LANES)) for _ in rows]
        dwords = self.spec.qk_head_dim // 4 // self.num_groups  # of a group
        num_steps = dwords // DWORDS
        num_parts = 1 << (self.num_groups * num_steps).bit_length() - 1
        num_parts = min(num_parts, POSITIONS // 2)
        with T.serial(self.num_groups) as group:
            totals = [[Register(LANES, INT32, integer(0)) for _ in range(2)] for _ in rows]
            with T.serial(num_steps) as i:
                part = index_temp((group * num_steps + i) % num_parts)
                for prefetch_part in prefetchers:
                    prefetch_part(part, num_parts)
                for d in range(DWORDS):
                    dword = group * dwords + i * DWORDS + d
                    codes = temp(self.blocks.k_vector(dword), LANES, INT32)
                    for r in rows:
                        for n in range(2):
                            q = self.q_bytes.dwords[first_row + r, n, dword]
                            add_dots(totals[r][n], codes, q)
            scale = temp(load(self.blocks.k_scales, (group, 0), LANES), LANES)
            for r in rows:
                total = put_together(*(t.get() for t in totals[r]))
                total = total - broadcast(self.q_zeros[first_row + r, group], LANES)
                scores[r].fma(T.cast(total, "float32x16"), scale)
        for r in rows:
            value = scores[r].get() * broadcast(self.q_bytes.scale[first_row + r], LANES)
            store(self.weights, (weights_row + r, column), LANES, value)

    def attend(self, step: DecodeStep, block, first_row, weights_row) -> None:
        """Take a block of positions into the sums of a set of rows."""
        self.state.update(
            block,
            BLOCK // LANES,
            lambda i, v: load(self.weights, (weights_row + i, v * LANES), LANES),
            lambda i, v, weight: store(self.weights, (weights_row + i, v * LANES), LANES, weight),
        )
        count = self.blocking.rows * self.num_groups
        for first in range(0, count, LANES):

            def weighted(i, start, first=first):
                row, group = divmod(first + i, self.num_groups)
                weight = load(self.weights, (weights_row + row, start), LANES)
                return weight * load(self.blocks.v_scales, (group, start), LANES)

            at = weights_row * self.num_groups + first
            self.weight_bytes.set_rows(index_temp(at), min(LANES, count - first), weighted)
        num_vectors = self.spec.v_head_dim // LANES
        for first in range(0, num_vectors, VECTORS):
            vectors = range(first, min(first + VECTORS, num_vectors))
            self._add_columns(step, first_row, weights_row, vectors)

    def _add_columns(self, step: DecodeStep, first_row, weights_row, vectors: range) -> None:
        """Add the weighted codes of some vectors of columns of one group."""
        rows, ends = range(self.blocking.rows), [end for _, end in self.blocks.groups]
        group = next(g for g, end in enumerate(ends) if vectors[0] * LANES < end)
        strip, num_strips = vectors[0] // VECTORS, -(-self.spec.v_head_dim // LANES // VECTORS)
        num_parts = min(POSITIONS, 1 << num_strips.bit_length() - 1)
        totals = {
            (r, c): [Register(LANES, INT32, integer(0)) for _ in range(2)]
            for r in rows
            for c in vectors
        }

        def packed_row(r):
            return (weights_row + r) * self.num_groups + group

        with T.serial((step.count + POSITIONS - 1) // POSITIONS) as i:
            following = index_temp(step.following_first + i * POSITIONS)
            for plane in (V_PLANE, K_PLANE):
                prefetch_part = self.blocks.prefetcher(step.following, following, plane)
                prefetch_part(strip % num_parts, num_parts)
            for j in range(POSITIONS // QUAD):
                quad = i * (POSITIONS // QUAD) + j
                codes = [
                    temp(load(self.blocks.v, (quad, c, 0), LANES, INT32), LANES, INT32)
                    for c in vectors
                ]
                for r in rows:
                    for n in range(2):
                        weight = temp(self.weight_bytes.dwords[packed_row(r), n, quad], 1, INT32)
                        for c, value in zip(vectors, codes, strict=True):
                            add_dots(totals[r, c][n], value, weight)
        for r in rows:
            row = index_temp(packed_row(r))
            decay = temp(self.state.rescale[self.row_state(first_row + r)])
            zeros = temp(self.weight_bytes.sums[row] * self.blocks.zero, 1, INT32)
            scale = temp(self.weight_bytes.scale[row])
            for c in vectors:
                total = put_together(*(t.get() for t in totals[r, c]))
                total = total - broadcast(zeros, LANES)
                value = T.cast(total, "float32x16") * broadcast(scale, LANES)
                at = (first_row + r, c * LANES)
                before = load(self.o, at, LANES) * broadcast(decay, LANES)
                store(self.o, at, LANES, before + value)


def split_of(spec: KernelSpec, ops, sm_scale, num_local_heads: int) -> DecodeSplit:
    """Make the split of a task."""
    kind = CodeSplit if has_code_blocks(spec) else DecodeSplit
    return kind(spec, ops, sm_scale, num_local_heads)


def scope_of(spec: KernelSpec):
    """Where splits may attend."""
    return vnni.scope() if has_code_blocks(spec) else nullcontext()
