# SPDX-License-Identifier: Apache-2.0
"""Stores of the sums of a unit: some rows and a block of output features."""

from __future__ import annotations

from collections.abc import Callable

from tvm.script import tirx as T

from tir_kernels.cpu.isa.simd import load, store

from .output_blocks import OutputBlocks


def store_sums(matrix: OutputBlocks, sums, unit, out, bias=None, residual=None) -> None:
    """Store the sums of a unit (block, first row, number of rows), plus what is added to them."""
    block, begin, count = unit

    def write(row, column, value, lanes):
        if bias is not None:
            value = value + load(bias, (column,), lanes)
        if residual is not None:
            value = value + load(residual, (begin + row, column), lanes)
        store(out, (begin + row, column), lanes, value)

    for_sums(matrix, sums, block, count, write)


def for_sums(matrix: OutputBlocks, sums, block, count, write: Callable) -> None:
    """Emit ``write(row, column, sums, lanes)`` for the columns of a block that exist."""
    lanes, num_blocks = matrix.target.lanes, matrix.num_blocks
    tail = matrix.out_features - (num_blocks - 1) * matrix.width
    first = block * matrix.width

    def part(row, at, lanes):
        write(row, first + at, load(sums, (row, at), lanes), lanes)

    def whole(row):
        for v in range(matrix.vectors):
            part(row, v * lanes, lanes)

    def rest(row):
        for v in range(tail // lanes):
            part(row, v * lanes, lanes)
        done = tail // lanes * lanes
        with T.serial(T.int64(tail - done)) as i:
            part(row, done + i, 1)

    with T.If(block < num_blocks - 1):
        with T.Then():
            with T.serial(count) as row:
                whole(row)
        with T.Else():
            with T.serial(count) as row:
                (rest if tail < matrix.width else whole)(row)
