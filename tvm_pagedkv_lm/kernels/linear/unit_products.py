# SPDX-License-Identifier: Apache-2.0
"""The products that suit a matrix and the CPU that it is packed for, and the loop over them."""

from __future__ import annotations

from tvm.script import tirx as T

from tir_kernels.cpu.isa.simd import temp

from ..rows.emit import parallel_if
from .code_matrix import CodeMatrix
from .code_sums import CodeSums
from .packed_layout import PackedMatrix
from .packed_products import PARALLEL_FLOPS, UNIT_ROWS, PackedProducts
from .tile_code_sums import TileCodeSums
from .tile_products import TileProducts
from .unit_sums import store_sums


def unit_products(matrix: PackedMatrix | CodeMatrix, dtype: str) -> PackedProducts | CodeSums:
    """Return what emits the products of a unit of rows of type `dtype` with blocks of a matrix."""
    if isinstance(matrix, PackedMatrix):
        return TileProducts(matrix) if matrix.has_tiles else PackedProducts(matrix)
    in_tiles = dtype == "bfloat16" and matrix.target.has_amx and matrix.multiplies_bytes
    return TileCodeSums(matrix) if in_tiles else CodeSums(matrix)


def multiply_units(products: PackedProducts | CodeSums, n, out, bias=None, residual=None) -> None:
    """Emit the products of n rows with all blocks, and store them, plus what is added to them."""
    matrix, num_blocks = products.matrix, products.matrix.num_blocks
    row_units = temp((n + UNIT_ROWS - 1) // UNIT_ROWS, 1, "int64")
    per_task = products.blocks_per_task(row_units)
    num_groups = num_blocks if per_task is None else (num_blocks + per_task - 1) // per_task

    def task(index):
        group = temp(index // row_units, 1, "int64")
        begin = temp(index % row_units * UNIT_ROWS, 1, "int64")
        count = temp(T.min(n - begin, T.int64(UNIT_ROWS)), 1, "int64")
        with products.unit(count, lambda row: begin + row) as sums:

            def multiply(block):
                store_sums(matrix, sums(block), (block, begin, count), out, bias, residual)

            if per_task is None:
                multiply(group)
            else:
                first = temp(group * per_task, 1, "int64")
                with T.serial(T.min(num_blocks - first, per_task)) as i:
                    multiply(temp(first + i, 1, "int64"))

    flops = n * (matrix.out_features * matrix.in_features)
    with products.scope():
        parallel_if(flops >= PARALLEL_FLOPS, row_units * num_groups, task)
