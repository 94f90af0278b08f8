# SPDX-License-Identifier: Apache-2.0
"""Many rows over positions that all of them see: everything transposed, rows lie along vectors.

A score tile is some positions by some vectors of rows. Its scalars are elements of K, and those of
the second product elements of V, so that neither is transposed; maxima and sums of rows need no
shuffles; and no position needs a mask. Q and O are transposed instead, once for all positions.
"""

from __future__ import annotations

from collections.abc import Callable

from tvm.script import tirx as T

from ....semantics.softmax import HIDDEN, NOTHING_SEEN
from ....signatures.inputs import AttentionInputs
from ....spec import LOG2E, KernelSpec
from ...columns import chunks
from ...components.kv_rows import PagedRows
from ...components.logits import AlibiBias, soft_cap
from ...matmul_tile import UNROLL, multiply_tile
from ...operands import ROWS_AT_ONCE
from ...shuffles import next_power_of_two, transpose
from ...simd import (
    F32,
    Register,
    broadcast,
    constant,
    elements_per_line,
    exp2,
    index_temp,
    load,
    store,
    temp,
)
from .tiling import POSITIONS, KvTile, Prefetch, RowBlock, SharedStep, SoftmaxState
from .values import values_of


class SharedTile:
    """The buffers of a task and what it does with them for one tile of rows after another.

    Parameters
    ----------
    spec : KernelSpec
    ops : operands object
    max_rows : int
        Rows of a tile.
    """

    def __init__(self, spec: KernelSpec, ops, max_rows: int):
        self.spec, self.ops, self.lanes = spec, ops, spec.target.lanes
        # Of a register tile; rows that fill no whole one take tiles of a single vector.
        has_many = spec.target.registers >= 32
        self.num_scalars, self.num_vectors = (8, 2) if has_many else (4, 3)
        self.narrow_scalars = 16 if has_many and spec.v_head_dim % 16 == 0 else 8
        self.depth = spec.qk_head_dim // ops.numbers
        lanes, vectors = self.lanes, -(-max_rows // self.lanes)
        self.q = T.alloc_buffer((vectors, self.depth, lanes), ops.dtype)
        self.sums = T.alloc_buffer((vectors, spec.v_head_dim, lanes), F32)
        self.k = T.alloc_buffer((POSITIONS, self.depth), ops.dtype)
        self.values = values_of(spec, ops, self.k, POSITIONS)
        self.q_rows = T.alloc_buffer((lanes, self.depth), ops.dtype)
        self.rotated = T.alloc_buffer((-(-spec.qk_head_dim // 32) * 32,), F32)
        self.scores = T.alloc_buffer((self.num_vectors, POSITIONS, lanes), F32)
        self.weights = (
            self.scores
            if ops.dtype == F32
            else T.alloc_buffer((self.num_vectors, POSITIONS // ops.numbers, lanes), ops.dtype)
        )
        self.decay = T.alloc_buffer((self.num_vectors * lanes,), F32)
        self.state = SoftmaxState(
            row_max=T.alloc_buffer((vectors * lanes,), F32),
            row_sum=T.alloc_buffer((vectors * lanes,), F32),
        )
        self.num_rows = vectors * lanes
        self.o = T.alloc_buffer((self.num_rows, spec.v_head_dim), F32)
        self.bias = AlibiBias.of(spec, vectors * lanes)

    def row_state(self, row):
        """Index of a row's state in `state.row_max` and `state.row_sum`."""
        return row

    def run(self, a: AttentionInputs, rows: PagedRows, step: SharedStep) -> None:
        """Attend from a cleared state; leaves `o` and `state`.

        Parameters
        ----------
        a : the kernel's arguments.
        rows : the source of K and V.
        step : SharedStep
        """
        lanes = self.lanes
        num_vectors = index_temp((step.num_rows + lanes - 1) // lanes)
        self.factor = temp(a.sm_scale * T.float32(LOG2E))
        with T.serial(num_vectors) as vector:
            self._load_q(a, step, vector)
        num_wide = index_temp(num_vectors // self.num_vectors)
        num_blocks = index_temp(num_vectors - num_wide * (self.num_vectors - 1))
        with T.serial(step.begin, step.end) as i:
            tile = KvTile(index_temp(i * POSITIONS), rows, step)
            self._copy(a, tile)
            with T.serial(num_blocks) as index:
                with T.If(index < num_wide):
                    with T.Then():
                        vector = index_temp(index * self.num_vectors)
                        sizes = self.num_vectors, self.num_scalars
                        self._attend(tile, RowBlock(index, num_blocks, vector, *sizes))
                    with T.Else():
                        vector = index_temp(index + num_wide * (self.num_vectors - 1))
                        sizes = 1, self.narrow_scalars
                        self._attend(tile, RowBlock(index, num_blocks, vector, *sizes))
        with T.serial(num_vectors) as vector:
            _transpose(
                lambda d, row, n: load(self.sums, (vector, d, row), n),
                lambda row, d, n, value: store(self.o, (vector * lanes + row, d), n, value),
                self.spec.v_head_dim,
                lanes,
            )

    def _load_q(self, a, step: SharedStep, vector) -> None:
        """Transpose a vector of rows of Q and clear their sums."""
        parts, ops, lanes = chunks(self.depth, self.lanes), self.ops, self.lanes
        with T.serial(lanes) as i:
            row = index_temp(vector * lanes + i)
            token, head = step.row_of(T.min(row, step.num_rows - 1))

            def plain():
                for c in parts:
                    q = ops.load_q(a.q, (token, head, c.start), c.lanes, self.factor)
                    store(self.q_rows, (i, c.start), c.lanes, q, ops.dtype)

            def rotated():
                a.rope.set_position(a.q_position(token))
                self._rotate(
                    a,
                    lambda column, lanes: load(a.q, (token, head, column), lanes),
                    (self.q_rows, i),
                    self.factor,
                )

            a.rope.for_q(rotated, plain)
            if self.bias:
                self.bias.set_row(row, head, a.q_rope_position[token])
        _transpose(
            lambda row, element, n: load(self.q_rows, (row, element), n, ops.dtype),
            lambda element, row, n, q: store(self.q, (vector, element, row), n, q, ops.dtype),
            lanes,
            self.depth,
            ops.dtype,
        )
        store(self.state.row_max, (vector * lanes,), lanes, constant(NOTHING_SEEN, lanes))
        store(self.state.row_sum, (vector * lanes,), lanes, constant(0.0, lanes))
        with T.serial(self.spec.v_head_dim) as d:
            store(self.sums, (vector, d, 0), lanes, constant(0.0, lanes))

    def _rotate(self, a, source: Callable, target: tuple, factor) -> None:
        """Rotate a row into ``target = (buffer, row)``."""
        a.rope.rotate_row(
            source, lambda column, lanes, value: store(self.rotated, (column,), lanes, value)
        )
        buffer, row = target
        for c in chunks(self.depth, self.lanes):
            elements = self.ops.load_rotated_q(self.rotated, c.start, c.lanes, factor)
            store(buffer, (row, c.start), c.lanes, elements, self.ops.dtype)

    def _copy(self, a, tile: KvTile) -> None:
        """Copy a tile of K and V; positions beyond the last one repeat others."""
        ops, step = self.ops, tile.step

        def plain():
            with T.serial(POSITIONS // ROWS_AT_ONCE) as i:
                source = tile.rows.tile(tile.first + i * ROWS_AT_ONCE, ROWS_AT_ONCE)
                first = index_temp(i * ROWS_AT_ONCE)
                for c in chunks(self.depth, self.lanes):
                    words = [
                        temp(ops.load_k(source, t, c.start, c.lanes), c.lanes, ops.dtype)
                        for t in range(ROWS_AT_ONCE)
                    ]
                    for t, k in enumerate(words):
                        store(self.k, (first + t, c.start), c.lanes, k, ops.dtype)
                    self.values.take(first, c, words)

        def rotated():
            with T.serial(POSITIONS) as i:
                source = tile.rows.tile(tile.first + i, 1)
                a.rope.set_position(step.k_offset + tile.first + i)
                self._rotate(
                    a,
                    lambda column, lanes: source.load_k(0, column, lanes),
                    (self.k, i),
                    T.float32(1),
                )

        a.rope.either(rotated, plain)
        self.values.pack(tile.rows, tile.first, step.kv_len)

    def _prefetcher(self, tile: KvTile, block: RowBlock, following: Prefetch) -> Callable | None:
        """Return a function that prefetches a little of the next tile in each step of a product.

        Asking for much at once would wait for the memory instead of multiplying.
        """
        spec = self.spec
        # The positions of one product lie side by side in a page.
        count = next_power_of_two(-(-POSITIONS // following.num_products))
        if count > min(POSITIONS, spec.page_size):
            return None
        per_line = elements_per_line(spec.v_dtype if following.is_v else spec.k_dtype)
        lines = -(-count * following.width // per_line)
        per_step = -(-lines // following.num_steps)
        # Every block prefetches for some products, and touches its own tile again for others.
        ahead = T.if_then_else(following.product % block.count == block.index, POSITIONS, 0)
        position = T.min(following.product * count, POSITIONS - count)
        source = tile.rows.tile(tile.first + ahead + position, count)
        ask = source.prefetch_v if following.is_v else source.prefetch_k

        def prefetch(step):
            for i in range(per_step):
                ask(0, (step * per_step + i) * per_line)

        return prefetch

    def _attend(self, tile: KvTile, block: RowBlock) -> None:
        """Take a tile of positions into the sums of a block of rows."""
        self._score(tile, block)
        num_seen = index_temp(T.min(POSITIONS, tile.step.kv_len - tile.first))
        with T.serial(POSITIONS - num_seen) as i:
            for n in range(block.num_vectors):
                at = (n, num_seen + i, 0)
                store(self.scores, at, self.lanes, constant(HIDDEN, self.lanes))
        self._weigh(block)
        self._add(tile, block)

    def _score(self, tile: KvTile, block: RowBlock) -> None:
        """Multiply K and Q."""
        ops, lanes, width = self.ops, self.lanes, self.spec.qk_head_dim
        num_tiles = POSITIONS // block.scalars

        def logit(position, c, value):
            value = value if ops.scale_in_q else value * broadcast(self.factor, lanes)
            value = soft_cap(value, self.spec.logit_softcap, lanes)
            if not self.bias:
                return value
            row = block.vector * lanes + c.start
            at = tile.step.k_offset + tile.first + position
            return value + self.bias.of_rows(row, lanes, at)

        with T.serial(num_tiles) as i:
            start = index_temp(i * block.scalars)
            multiply_tile(
                lambda j, element: self.k[start + j, element],
                lambda element, c: (self.q, (block.vector + c.start // lanes, element, 0)),
                self.depth,
                rows=block.scalars,
                parts=block.parts(lanes),
                start=lambda j, c: constant(0.0, lanes),
                finish=lambda j, c, value: store(
                    self.scores, (c.start // lanes, start + j, 0), lanes, logit(start + j, c, value)
                ),
                ops=ops,
                each_step=self._prefetcher(
                    tile, block, Prefetch(False, width, i, num_tiles, self.depth // UNROLL)
                ),
            )

    def _add(self, tile: KvTile, block: RowBlock) -> None:
        """Multiply V and the weights."""
        ops, lanes, width = self.ops, self.lanes, self.spec.v_head_dim
        num_tiles, depth = width // block.scalars, POSITIONS // ops.numbers
        has_v = self.spec.kind != "mla"  # there V is in K

        def at(j, c):
            return (block.vector + c.start // lanes, column + j * self.values.step, 0)

        with T.serial(num_tiles) as i:
            start = index_temp(i * block.scalars)
            column = index_temp(self.values.column(start))
            following = Prefetch(True, width, i, num_tiles, depth // UNROLL)
            multiply_tile(
                lambda j, position: self.values.scalar(position, start, j),
                lambda position, c: (self.weights, (c.start // lanes, position, 0)),
                depth,
                rows=block.scalars,
                parts=block.parts(lanes),
                start=lambda j, c: (
                    load(self.sums, at(j, c), lanes) * load(self.decay, (c.start,), lanes)
                ),
                finish=lambda j, c, value: store(self.sums, at(j, c), lanes, value),
                ops=ops,
                each_step=self._prefetcher(tile, block, following) if has_v else None,
            )

    def _weigh(self, block: RowBlock) -> None:
        """Turn scores into weights; update maxima and sums, and say how earlier sums decay."""
        ops, lanes = self.ops, self.lanes
        at_once = 2 * ops.numbers  # positions
        for n in range(block.num_vectors):
            at = ((block.vector + n) * lanes,)
            old = temp(load(self.state.row_max, at, lanes), lanes)
            maxima = [Register(lanes, init=old) for _ in range(4)]
            with T.serial(POSITIONS // 4) as i:
                for j, maximum in enumerate(maxima):
                    maximum.set(T.max(maximum.get(), load(self.scores, (n, i * 4 + j, 0), lanes)))
            a, b, c, d = (m.get() for m in maxima)
            top = temp(T.max(T.max(a, b), T.max(c, d)), lanes)
            total = [Register(lanes, init=constant(0.0, lanes)) for _ in range(2)]
            with T.serial(POSITIONS // at_once) as i:
                for j in range(2):
                    weights = [
                        exp2(
                            load(self.scores, (n, i * at_once + j * ops.numbers + m, 0), lanes)
                            - top,
                            lanes,
                        )
                        for m in range(ops.numbers)
                    ]
                    for weight in weights:
                        total[j].set(total[j].get() + weight)
                    store(self.weights, (n, i * 2 + j, 0), lanes, ops.repack(weights), ops.dtype)
            decay = exp2(old - top, lanes)
            store(self.decay, (n * lanes,), lanes, decay)
            store(self.state.row_max, at, lanes, top)
            value = load(self.state.row_sum, at, lanes) * decay + total[0].get() + total[1].get()
            store(self.state.row_sum, at, lanes, value)


def _transpose(source: Callable, sink: Callable, rows: int, columns: int, dtype=F32) -> None:
    """Emit the transpose of a ``[rows, columns]`` block, in squares of as many lanes as fit.

    Parameters
    ----------
    source : ``(row, column, lanes) -> vector``
    sink : ``(column, row, lanes, value)``
    rows, columns : int
        Multiples of a common power of two; the squares are of 16 at most.
    """
    size = min(16, rows & -rows, columns & -columns)
    with T.serial(rows // size) as i, T.serial(columns // size) as j:
        square = transpose([source(i * size + r, j * size, size) for r in range(size)], dtype)
        for c, value in enumerate(square):
            sink(j * size + c, i * size, size, value)
