# SPDX-License-Identifier: Apache-2.0
"""Sums of products of rows of activations with a block of quantized weights."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext

from tvm.script import tirx as T

from tir_kernels.cpu.simd import F32, INTO_L1, constant, import_llvm, prefetch, store, temp

from .code_matrix import CodeMatrix
from .code_products import llvm_helpers, products_of
from .packed_products import UNIT_ROWS, for_tiles
from .row_codes import ROW_BYTES

_BYTES_AHEAD = 4096  # of weights that are prefetched, into the L1 cache


class CodeSums:
    """Emits the products of up to `UNIT_ROWS` rows with a block, as `PackedProducts` does.

    Parameters
    ----------
    matrix : CodeMatrix
    """

    def __init__(self, matrix: CodeMatrix):
        self.matrix = matrix

    def rows(self, n, dtype: str) -> list[tuple]:
        """Return name, shape and type of the arguments that hold n rows of activations.

        They are the results of `row_codes.encode_rows` where codes are multiplied, or numbers.
        """
        matrix = self.matrix
        if not matrix.multiplies_codes:
            return [("x", (n, matrix.in_features), dtype)]
        return [
            ("x_codes", (n, matrix.num_groups, ROW_BYTES), "uint8"),
            ("x_scales", (n, matrix.num_groups), F32),
            ("x_sums", (n, matrix.num_groups), "int32"),
        ]

    def begin(self, x, weight) -> None:
        """Name the buffers of the rows and of the packed weights, where they are matched."""
        self.x, self.weight = x, weight

    def scope(self):
        """Open the scope in which products can be emitted."""
        helpers = llvm_helpers(self.matrix)
        return import_llvm(*helpers) if helpers else nullcontext()

    def sums(self, block, count, row_of: Callable):
        """Return a buffer of products; parameters are those of `PackedProducts.sums`."""
        matrix, lanes = self.matrix, self.matrix.target.lanes
        _, num_groups, group_bytes = matrix.shape
        sums = T.alloc_buffer((UNIT_ROWS, matrix.width), F32)
        products = products_of(matrix)(matrix, self.weight, self.x, UNIT_ROWS, row_of)
        with T.serial(count) as row:
            for v in range(matrix.vectors):
                store(sums, (row, v * lanes), lanes, constant(0.0, lanes))
        part = products.num_groups
        with T.serial(T.int64(-(-num_groups // part))) as i:
            group = temp(i * part, 1, "int64")
            for line in range(0, part * group_bytes, 64):
                ahead = group * group_bytes + line + _BYTES_AHEAD
                prefetch(self.weight, (block, ahead // group_bytes, ahead % group_bytes), INTO_L1)
            products.begin_part(block, group, count)

            def add(row, rows: int):
                products.add_tile(sums, row, rows, block, group)

            for_tiles(count, add)
        return sums
