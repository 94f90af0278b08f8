# SPDX-License-Identifier: Apache-2.0
"""Products of rows of activations with a block of packed weights of floating-point numbers.

Prefill splits a block into parts of `DEPTH` input features, which stay in the CPU caches for all
`TASK_ROWS` rows; partial sums are float32.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from tvm.script import tirx as T

from tir_kernels.cpu.isa.bf16 import PairOperands
from tir_kernels.cpu.isa.operands import Float32Operands
from tir_kernels.cpu.isa.simd import (
    F32,
    Register,
    broadcast,
    constant,
    elements_per_line,
    load,
    prefetch,
    store,
    temp,
)
from tir_kernels.script import opened

from ..define import matcher
from .packed_layout import PackedMatrix

TILE_ROWS = 6
TASK_ROWS = 16 * TILE_ROWS  # rows that reuse a part of a block before the next part
DEPTH = 512  # input features of a part
# For a single row of activations: cache lines of weights read in a loop iteration, and prefetched
# ahead of it. float16 gains 5 to 15 % on Zen 5 over two lines at a time, the other types nothing.
LINES_PER_STEP = 8
LINES_AHEAD = 128
PARALLEL_FLOPS = 1 << 19  # below: cheaper than waking the other threads


class PackedProducts:
    """Emits the products of up to `TASK_ROWS` rows with a block of a packed matrix.

    Parameters
    ----------
    matrix : PackedMatrix
    """

    def __init__(self, matrix: PackedMatrix):
        self.matrix, self.lanes = matrix, matrix.target.lanes
        self.ops = PairOperands() if matrix.has_pairs else Float32Operands(self.lanes)
        self.widens = matrix.dtype != F32 and not matrix.has_pairs
        self.depth = matrix.in_features // matrix.numbers
        self.per_line = elements_per_line(matrix.dtype)
        self.row_lines = matrix.width * matrix.numbers // self.per_line

    unused_rows = frozenset({"var_x_scales", "var_x_sums"})  # arguments that kernels do without
    takes_many_blocks = False  # whether a task may multiply more than one block

    def match_rows(self, n, dtype: str, x, x_scales, x_sums) -> tuple:
        """Match the argument that holds n rows of activations."""
        return (matcher(self.matrix.target, dtype)(x, n, self.matrix.in_features),)

    def begin(self, rows, weight) -> None:
        """Name the buffers of the rows and of the packed weights, where they are matched."""
        (x,) = rows
        self.x, self.weight = x, weight
        if self.matrix.has_pairs:
            self.ops.begin([x, weight])

    def open_scope(self) -> None:
        """Open the scope in which products can be emitted, for the rest of a kernel."""
        opened(self.scope())

    def scope(self):
        """Return that scope."""
        return self.ops.scope()

    def blocks_per_task(self, row_tasks):
        """Return how many blocks one task multiplies with its rows."""
        return 1

    @contextmanager
    def task(self, count, row_of: Callable) -> Iterator[Callable]:
        """Emit what the rows of a task need around its products.

        Parameters
        ----------
        count : number of rows
        row_of : callable
            ``row_of(row)`` is the row of x that row `row` of the result comes from.

        Yields
        ------
        callable
            ``sums(block)`` emits the products with a block of the packed weights, and returns a
            buffer ``[TASK_ROWS, width]`` that holds them.
        """

        def sums(block):
            buffer = T.alloc_buffer((TASK_ROWS, self.matrix.width), F32)
            self._add_vectors(buffer, block, count, row_of)
            return buffer

        yield sums

    def _add_vectors(self, sums, block, count, row_of: Callable) -> None:
        """Emit the products with a block, whose sums are in vector registers."""
        lanes, matrix = self.lanes, self.matrix
        part = DEPTH // matrix.numbers
        wide = T.alloc_buffer((TASK_ROWS, DEPTH), F32) if self.widens else None
        with T.serial(count) as row:
            for v in range(matrix.vectors):
                store(sums, (row, v * lanes), lanes, constant(0.0, lanes))
        with T.serial(T.int64(-(-self.depth // part))) as i:
            first = temp(i * part, 1, "int64")
            length = temp(T.min(T.int64(self.depth) - first, T.int64(part)), 1, "int64")
            if wide is not None:
                widen(self.x, wide, row_of, count, first, length, lanes)

            def add(row, rows: int):
                self._add_tile(sums, wide, block, (row, rows, row_of), (first, length))

            for_tiles(count, add)

    def _add_tile(self, sums, wide, block, tile, part) -> None:
        """Add the products of a tile (row, rows, row_of) over a part of the input features."""
        (row, rows, row_of), (first, length) = tile, part
        lanes, ops, vectors = self.lanes, self.ops, range(self.matrix.vectors)
        totals = {
            (r, v): Register(lanes, init=load(sums, (row + r, v * lanes), lanes))
            for r in range(rows)
            for v in vectors
        }
        sources = [temp(row_of(row + r), 1, "int64") for r in range(rows)]

        def load_weight(k, v):
            if self.matrix.has_pairs:
                return ops.pairs(self.weight, (block, k, v * lanes), lanes)
            return load(self.weight, (block, k, v * lanes), lanes)

        def load_x(r, k):
            if wide is not None:
                return wide[row + r, k]
            if self.matrix.has_pairs:
                return ops.pairs(self.x, (sources[r], first + k), 1)
            return self.x[sources[r], first + k]

        def step(k):
            loaded = [temp(load_weight(k, v), lanes, ops.dtype) for v in vectors]
            for r in range(rows):
                value = temp(load_x(r, k - first), 1, ops.dtype)
                for v, column in enumerate(loaded):
                    total, factor = totals[r, v], broadcast(value, lanes)
                    total.set(ops.fma(total.get(), factor, column, lanes))

        def steps(k):
            """`unroll` steps, whose weights were prefetched some iterations before."""
            if unroll > 1:
                for i in range(0, LINES_PER_STEP, 1 + self.matrix.target.fetches_streams):
                    u, line = divmod(i, self.row_lines)
                    ahead = k + u + LINES_AHEAD // self.row_lines
                    prefetch(self.weight, (block, ahead, line * self.per_line))
            for u in range(unroll):
                step(k + u)

        unroll = LINES_PER_STEP // self.row_lines if rows == 1 and self.row_lines > 1 else 1
        whole = length // unroll * unroll
        with T.serial(length // unroll) as i:
            steps(temp(first + i * unroll, 1, "int64"))
        if unroll > 1:
            with T.serial(length - whole) as i:
                step(temp(first + whole + i, 1, "int64"))
        for (r, v), total in totals.items():
            store(sums, (row + r, v * lanes), lanes, total.get())


def for_tiles(count, add: Callable) -> None:
    """Emit ``add(row, rows)`` for tiles of `count` rows: `TILE_ROWS` each, then 4, 2 and 1."""
    with T.serial(count // TILE_ROWS) as j:
        add(temp(j * TILE_ROWS, 1, "int64"), TILE_ROWS)
    row = Register(1, "int64", init=count // TILE_ROWS * TILE_ROWS)
    for rows in (4, 2, 1):
        with T.If(T.bitwise_and(count % TILE_ROWS, T.int64(rows)) != T.int64(0)):
            with T.Then():
                add(row.get(), rows)
                row.set(row.get() + T.int64(rows))


def widen(x, wide, row_of: Callable, count, first, length, lanes: int) -> None:
    """Convert a part of the rows of a task to float32."""
    with T.serial(count) as row:
        source = temp(row_of(row), 1, "int64")
        with T.serial(length // lanes) as j:
            value = load(x, (source, first + j * lanes), lanes)
            store(wide, (row, j * lanes), lanes, value)
        with T.serial(length % lanes) as j:
            k = temp(length // lanes * lanes + j, 1, "int64")
            store(wide, (row, k), 1, load(x, (source, first + k), 1))
