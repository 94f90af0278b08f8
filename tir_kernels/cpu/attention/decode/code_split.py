# SPDX-License-Identifier: Apache-2.0
"""A decode split over quantized pages, whose codes are multiplied themselves, as bytes.

Q and the weights become integers of 16 bits, each row with a scale of its own: for Q and for each
block of weights, times the scales of V. An error of Q is at most 1.6e-5 of the row's largest value,
one of a weight at most 1.6e-5 of the block's largest. K's scales multiply the sums of products,
group by group; V's are in the weights.
"""

from __future__ import annotations

from contextlib import contextmanager, nullcontext

from tvm.script import tirx as T

from ....layout import K_PLANE, V_PLANE
from ....spec import KernelSpec
from ... import bit_masks, vnni
from ...simd import Register, broadcast, constant, index_temp, load, store, temp
from ...vnni import INT32, LANES, TwoBytes, add_dots, integer, put_together
from .blocking import BLOCK, DecodeStep
from .code_blocks import POSITIONS, QUAD, CodeBlocks, has_code_blocks
from .split import DecodeSplit

ACCUMULATORS = 16  # sums that are in registers at once
MAX_VECTORS = 4  # of columns of O that are summed at once
DWORDS = 4  # of rows of K that are multiplied between prefetches


class CodeSplit(DecodeSplit):
    """As `DecodeSplit`, for specs with `code_blocks.has_code_blocks`."""

    def __init__(self, spec: KernelSpec, ops, sm_scale, num_local_heads: int = 1):
        super().__init__(spec, ops, sm_scale, num_local_heads)
        blocks = self.blocks = CodeBlocks(spec)
        row_blocks, rows = self.blocking.row_blocks, self.blocking.rows
        k, v = blocks.k_rows, blocks.v_rows
        num_segments = k.num_pieces * len(k.halves)
        self.q_bytes = TwoBytes(
            num_local_heads * row_blocks, rows, spec.qk_head_dim, k.zero, num_segments
        )
        self.weight_bytes = TwoBytes(1, rows * len(v.groups), BLOCK, v.zero)

    def start(self, a, sequence, head, local_head=0) -> None:
        """Take the query rows of a KV head and clear its sums."""
        super().start(a, sequence, head, local_head)

        def set_rows(block, first_row, _):
            self.q_bytes.set_rows(
                block, lambda i, start: load(self.q, (first_row + i, start), LANES)
            )

        self.for_row_blocks(local_head, set_rows)

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
                lambda block, _, row: self._score_rows(block, row, column, prefetchers),
            )

    def _score_rows(self, block, weights_row, column, prefetchers) -> None:
        """The scores of one set of rows for the positions in `blocks`."""
        blocks, rows = self.blocks, range(self.blocking.rows)
        scores = [Register(LANES, init=constant(0.0, LANES)) for _ in rows]
        halves = blocks.k_rows.halves
        if 2 * len(rows) * len(halves) <= ACCUMULATORS:
            self._add_scores(scores, block, halves, prefetchers)
        else:
            for half in halves:  # or their sums would not fit the registers
                self._add_scores(scores, block, [half], [] if half else prefetchers)
        for r in rows:
            factor = self.q_bytes.scale[self.q_bytes.index(block, r)]
            value = scores[r].get() * broadcast(factor, LANES)
            store(self.weights, (weights_row + r, column), LANES, value)

    def _add_scores(self, scores: list[Register], block, halves, prefetchers) -> None:
        """Add the products of some halves of the columns."""
        blocks, q, rows = self.blocks, self.q_bytes, range(self.blocking.rows)
        k = blocks.k_rows
        num_steps = k.piece // DWORDS
        num_parts = 1 << (k.num_pieces * num_steps).bit_length() - 1
        num_parts = min(num_parts, POSITIONS // 2)
        # Several sets of sums in turn: one would wait for the latency of the dot product.
        num_turns = min(DWORDS, max(1, ACCUMULATORS // (2 * len(rows) * len(halves))))
        with T.serial(k.num_pieces) as piece:
            totals = {
                (r, half, turn): [Register(LANES, INT32, integer(0)) for _ in range(2)]
                for r in rows
                for half in halves
                for turn in range(num_turns)
            }
            with T.serial(num_steps) as i:
                part = index_temp((piece * num_steps + i) % num_parts)
                for prefetch_part in prefetchers:
                    prefetch_part(part, num_parts)
                for d in range(DWORDS):
                    dword = piece * k.piece + i * DWORDS + d
                    codes = blocks.k_vectors(dword, halves)
                    for r in rows:
                        for half, value in zip(halves, codes, strict=True):
                            q_dword = k.code_bytes // 4 * half + dword
                            for n, total in enumerate(totals[r, half, d % num_turns]):
                                add_dots(total, value, q.dword(block, r, n, q_dword))
            for half in halves:
                at = (k.group_of(piece, half), 0)
                scale = temp(load(blocks.k_scales, at, LANES), LANES)
                for r in rows:
                    turns = [totals[r, half, turn] for turn in range(num_turns)]
                    total = blocks.sum_of(_sum_of_turns(turns), half)
                    offset = q.offsets[k.segment(piece, half), q.index(block, r)]
                    total = total + broadcast(offset, LANES)
                    scores[r].fma(T.cast(total, "float32x16"), scale)

    def attend(self, step: DecodeStep, block, first_row, weights_row) -> None:
        """Take a block of positions into the sums of a set of rows."""
        self.state.update(block, self.weights, weights_row, self.weights, self.ops)
        num_groups = len(self.blocks.v_rows.groups)

        def weighted(i, start):
            row, group = divmod(i, num_groups)
            weight = load(self.weights, (weights_row + row, start), LANES)
            return weight * load(self.blocks.v_scales, (group, start), LANES)

        self.weight_bytes.set_rows(0, weighted)
        num_vectors, rows = self.spec.v_head_dim // LANES, self.blocking.rows
        at_once = max(1, min(MAX_VECTORS, ACCUMULATORS // (2 * rows)))
        for strip, first in enumerate(range(0, num_vectors, at_once)):
            vectors = range(first, min(first + at_once, num_vectors))
            self._add_columns(step, first_row, vectors, strip, -(-num_vectors // at_once))

    def _add_columns(self, step, first_row, vectors: range, strip: int, num_strips: int) -> None:
        """Add the weighted codes of some vectors of columns: a strip of O."""
        blocks, weights, rows = self.blocks, self.weight_bytes, range(self.blocking.rows)
        num_groups, half_width = len(blocks.v_rows.groups), blocks.v_rows.code_bytes // LANES
        width = self.spec.v_head_dim // num_groups
        num_parts = min(POSITIONS, 1 << num_strips.bit_length() - 1)
        totals = {
            (r, c): [Register(LANES, INT32, integer(0)) for _ in range(2)]
            for r in rows
            for c in vectors
        }

        def packed_row(r: int, c: int) -> int:
            return r * num_groups + c * LANES // width

        with T.serial((step.count + POSITIONS - 1) // POSITIONS) as i:
            following = index_temp(step.following_first + i * POSITIONS)
            for plane in (V_PLANE, K_PLANE):
                prefetch_part = blocks.prefetcher(step.following, following, plane)
                prefetch_part(strip % num_parts, num_parts)
            for j in range(POSITIONS // QUAD):
                quad = i * (POSITIONS // QUAD) + j
                codes = [
                    temp(load(blocks.v, (quad, c, 0), LANES, INT32), LANES, INT32) for c in vectors
                ]
                for r in rows:
                    for n in range(2):
                        dwords = {
                            row: temp(weights.dword(0, row, n, quad), 1, INT32)
                            for row in sorted({packed_row(r, c) for c in vectors})
                        }
                        for c, value in zip(vectors, codes, strict=True):
                            add_dots(totals[r, c][n], value, dwords[packed_row(r, c)])
        for r in rows:
            decay = temp(self.state.rescale[self.row_state(first_row + r)])
            for c in vectors:
                row = weights.index(0, packed_row(r, c))
                total = blocks.sum_of(
                    put_together(*(t.get() for t in totals[r, c])), c // half_width
                )
                total = total + broadcast(weights.offsets[0, row], LANES)
                value = T.cast(total, "float32x16") * broadcast(weights.scale[row], LANES)
                at = (first_row + r, c * LANES)
                before = load(self.o, at, LANES) * broadcast(decay, LANES)
                store(self.o, at, LANES, before + value)


def _sum_of_turns(turns: list):
    """The sum of products of all turns, of the high and of the low bytes."""
    parts = []
    for registers in zip(*turns, strict=True):
        value = registers[0].get()
        for register in registers[1:]:
            value = temp(value + register.get(), LANES, INT32)
        parts.append(value)
    return put_together(*parts)


def split_of(spec: KernelSpec, ops, sm_scale, num_local_heads: int) -> DecodeSplit:
    """Make the split of a task."""
    kind = CodeSplit if has_code_blocks(spec) else DecodeSplit
    return kind(spec, ops, sm_scale, num_local_heads)


@contextmanager
def scope_of(spec: KernelSpec):
    """Where splits may attend."""
    if not has_code_blocks(spec):
        yield
        return
    has_bits = any(codec.has_bit_plane for codec in (spec.codec.k, spec.codec.v))
    with vnni.scope(), bit_masks.scope() if has_bits else nullcontext():
        yield
