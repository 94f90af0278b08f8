# SPDX-License-Identifier: Apache-2.0
"""Linear layers: packed weights, and the kernels that multiply with them or look up their rows.

A weight matrix is packed as blocks of output features, ``[blocks, in_features, width]``. A block is
read once, in order, for a tile of rows of activations in registers. If the CPU multiplies pairs of
bfloat16, neighbouring input features are adjacent: ``[blocks, in_features / 2, width * 2]``.

Prefill splits the blocks into parts of `DEPTH` input features, which stay in the CPU caches for
all `UNIT_ROWS` rows; partial sums are float32.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from tvm import tirx
from tvm.script import tirx as T

from tir_kernels.cpu.bf16 import PairOperands
from tir_kernels.cpu.operands import Float32Operands
from tir_kernels.cpu.simd import (
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
from tir_kernels.spec import VectorTarget

from .emit import parallel_if, rows_kernel
from .output_blocks import OutputBlocks

TILE_ROWS = 6
UNIT_ROWS = 16 * TILE_ROWS  # rows that reuse a part of a block before the next part
DEPTH = 512  # input features of a part
# For a single row of activations: cache lines of weights read in a loop iteration, and prefetched
# ahead of it. float16 gains 5 to 15 % on Zen 5 over two lines at a time, the other types nothing.
LINES_PER_STEP = 8
LINES_AHEAD = 128
PARALLEL_FLOPS = 1 << 19  # below: cheaper than waking the other threads


@dataclass(frozen=True)
class PackedMatrix(OutputBlocks):
    """The packed layout of a weight matrix for a target.

    Parameters
    ----------
    out_features, in_features : int
    dtype : str
    target : VectorTarget
    """

    out_features: int
    in_features: int
    dtype: str
    target: VectorTarget

    @property
    def has_pairs(self) -> bool:
        """Whether two neighbouring input features form one operand."""
        even = self.in_features % 2 == 0
        return self.dtype == "bfloat16" and self.target.multiplies_pairs and even

    @property
    def numbers(self) -> int:
        """Input features of an operand."""
        return 2 if self.has_pairs else 1

    @property
    def shape(self) -> tuple[int, int, int]:
        """Shape of the packed weights."""
        return self.num_blocks, self.in_features // self.numbers, self.width * self.numbers

    def pack(self, weight: np.ndarray) -> np.ndarray:
        """Pack ``[out_features, in_features]``."""
        padded = np.zeros((self.num_blocks * self.width, self.in_features), weight.dtype)
        padded[: len(weight)] = weight
        blocks = padded.reshape(self.num_blocks, self.width, -1, self.numbers)
        return np.ascontiguousarray(blocks.transpose(0, 2, 1, 3)).reshape(self.shape)

    def index(self, row, column) -> list:
        """Where an element is."""
        n = self.numbers
        return [row // self.width, column // n, row % self.width * n + column % n]


def linear(
    matrix: PackedMatrix, out_dtype: str, *, bias: bool = False, residual: bool = False
) -> tirx.PrimFunc:
    """``out = x @ weight.T (+ bias) (+ residual)``, accumulated in float32.

    Arguments of the kernel: x [n, in_features], packed weight, bias [out_features] and residual
    [n, out_features] where chosen, out [n, out_features] of `out_dtype`.
    """
    lanes, width = matrix.target.lanes, matrix.width
    num_blocks, depth, _ = matrix.shape
    part = DEPTH // matrix.numbers
    ops = PairOperands() if matrix.has_pairs else Float32Operands(lanes)
    widens = matrix.dtype != F32 and not matrix.has_pairs
    per_line = elements_per_line(matrix.dtype)
    row_lines = width * matrix.numbers // per_line

    def body(n, x, weight, *extras_and_out):
        *extras, out = extras_and_out
        if matrix.has_pairs:
            ops.begin([x, weight])
        row_units = temp((n + UNIT_ROWS - 1) // UNIT_ROWS, 1, "int64")

        def load_weight(block, k, v):
            if matrix.has_pairs:
                return ops.pairs(weight, (block, k, v * lanes), lanes)
            return load(weight, (block, k, v * lanes), lanes)

        def unit(index):
            block = temp(index // row_units, 1, "int64")
            begin = temp(index % row_units * UNIT_ROWS, 1, "int64")
            count = temp(T.min(n - begin, T.int64(UNIT_ROWS)), 1, "int64")
            sums = T.alloc_buffer((UNIT_ROWS, width), F32)
            wide = T.alloc_buffer((UNIT_ROWS, DEPTH), F32) if widens else None

            def load_x(row, first, k):
                if matrix.has_pairs:
                    return ops.pairs(x, (begin + row, first + k), 1)
                return wide[row, k] if widens else x[begin + row, first + k]

            def tile(row, rows: int, first, length):
                parts = [(r, v) for r in range(rows) for v in range(matrix.vectors)]
                totals = {
                    (r, v): Register(lanes, init=load(sums, (row + r, v * lanes), lanes))
                    for r, v in parts
                }

                def step(k):
                    loaded = [
                        temp(load_weight(block, k, v), lanes, ops.dtype)
                        for v in range(matrix.vectors)
                    ]
                    for r in range(rows):
                        value = temp(load_x(row + r, first, k - first), 1, ops.dtype)
                        for v, column in enumerate(loaded):
                            total, factor = totals[r, v], broadcast(value, lanes)
                            total.set(ops.fma(total.get(), factor, column, lanes))

                def steps(k):
                    """`unroll` steps, whose weights were prefetched some iterations before."""
                    if unroll > 1:
                        for u, line in np.ndindex(unroll, row_lines):
                            ahead = k + u + LINES_AHEAD // row_lines
                            prefetch(weight, (block, ahead, line * per_line))
                    for u in range(unroll):
                        step(k + u)

                unroll = LINES_PER_STEP // row_lines if rows == 1 and row_lines > 1 else 1
                whole = length // unroll * unroll
                with T.serial(length // unroll) as i:
                    steps(temp(first + i * unroll, 1, "int64"))
                if unroll > 1:
                    with T.serial(length - whole) as i:
                        step(temp(first + whole + i, 1, "int64"))
                for (r, v), total in totals.items():
                    store(sums, (row + r, v * lanes), lanes, total.get())

            with T.serial(count) as row:
                for v in range(matrix.vectors):
                    store(sums, (row, v * lanes), lanes, constant(0.0, lanes))
            with T.serial(T.int64(-(-depth // part))) as i:
                first = temp(i * part, 1, "int64")
                length = temp(T.min(T.int64(depth) - first, T.int64(part)), 1, "int64")
                if widens:
                    widen(x, wide, begin, count, first, length, lanes)
                with T.serial(count // TILE_ROWS) as j:
                    tile(temp(j * TILE_ROWS, 1, "int64"), TILE_ROWS, first, length)
                row = Register(1, "int64", init=count // TILE_ROWS * TILE_ROWS)
                for rows in (4, 2, 1):
                    with T.If(T.bitwise_and(count % TILE_ROWS, T.int64(rows)) != T.int64(0)):
                        with T.Then():
                            tile(row.get(), rows, first, length)
                            row.set(row.get() + T.int64(rows))

            addends = (extras[0] if bias else None, extras[-1] if residual else None)
            store_sums(matrix, sums, (block, begin, count), out, *addends)

        flops = n * (matrix.out_features * matrix.in_features)
        with ops.scope():
            parallel_if(flops >= PARALLEL_FLOPS, row_units * num_blocks, unit)

    def arguments(n):
        return [
            ("x", (n, matrix.in_features), matrix.dtype),
            ("weight", matrix.shape, matrix.dtype),
            *([("bias", (matrix.out_features,), matrix.dtype)] if bias else []),
            *([("residual", (n, matrix.out_features), matrix.dtype)] if residual else []),
            ("out", (n, matrix.out_features), out_dtype),
        ]

    return rows_kernel(arguments, body, matrix.target)


def widen(x, wide, begin, count, first, length, lanes: int) -> None:
    """Convert a part of the rows of a unit to float32."""
    with T.serial(count) as row:
        with T.serial(length // lanes) as j:
            value = load(x, (begin + row, first + j * lanes), lanes)
            store(wide, (row, j * lanes), lanes, value)
        with T.serial(length % lanes) as j:
            k = temp(length // lanes * lanes + j, 1, "int64")
            store(wide, (row, k), 1, load(x, (begin + row, first + k), 1))


def store_sums(matrix, sums, unit, out, bias=None, residual=None) -> None:
    """Store the sums of a unit (block, first row, number of rows), plus what is added to them."""
    block, begin, count = unit

    def write(column, at, lanes):
        """Store `lanes` sums of a row of the unit from `at` on."""

        def write_row(row):
            value = load(sums, (row, at), lanes)
            if bias is not None:
                value = value + load(bias, (column,), lanes)
            if residual is not None:
                value = value + load(residual, (begin + row, column), lanes)
            store(out, (begin + row, column), lanes, value)

        return write_row

    _for_outputs(matrix, block, count, write)


def _for_outputs(matrix: PackedMatrix, block, count, write: Callable) -> None:
    """Emit ``write(column, at, lanes)(row)`` for the columns of a block that exist."""
    lanes, num_blocks = matrix.target.lanes, matrix.num_blocks
    tail = matrix.out_features - (num_blocks - 1) * matrix.width
    first = block * matrix.width

    def whole(row):
        for v in range(matrix.vectors):
            write(first + v * lanes, v * lanes, lanes)(row)

    def rest(row):
        for v in range(tail // lanes):
            write(first + v * lanes, v * lanes, lanes)(row)
        done = tail // lanes * lanes
        with T.serial(T.int64(tail - done)) as i:
            write(first + done + i, done + i, 1)(row)

    with T.If(block < num_blocks - 1):
        with T.Then():
            with T.serial(count) as row:
                whole(row)
        with T.Else():
            with T.serial(count) as row:
                (rest if tail < matrix.width else whole)(row)


def embedding(matrix: PackedMatrix, scale: float = 1.0) -> tirx.PrimFunc:
    """Rows of a packed matrix times `scale`: ids int32 [n], packed weight, out [n, in_features]."""

    def body(n, ids, weight, out):
        with T.serial(n) as i, T.serial(T.int64(matrix.in_features)) as j:
            row = T.cast(ids[i], "int64")
            value = load(weight, matrix.index(row, j), 1)
            store(out, [i, j], 1, value if scale == 1.0 else value * T.float32(scale))

    def arguments(n):
        return [
            ("ids", (n,), "int32"),
            ("weight", matrix.shape, matrix.dtype),
            ("out", (n, matrix.in_features), matrix.dtype),
        ]

    return rows_kernel(arguments, body, matrix.target)
