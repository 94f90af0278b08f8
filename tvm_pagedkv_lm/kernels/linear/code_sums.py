# SPDX-License-Identifier: Apache-2.0
"""Sums of products of rows of activations with a block of quantized weights."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from itertools import product

import numpy as np
from tvm.script import tirx as T

from tir_kernels.cpu.isa.simd import (
    CACHE_LINE_BYTES,
    F32,
    INTO_L1,
    INTO_L2,
    Register,
    constant,
    import_llvm,
    prefetch,
    store,
    temp,
)
from tir_kernels.cpu.isa.stack import ALIGN_STACK, align_stack
from tir_kernels.script import opened

from ..define import match_float32, match_int32, matcher
from .code_matrix import CodeMatrix
from .code_products import llvm_helpers, products_of
from .packed_products import TASK_ROWS, for_tiles
from .row_codes import ROW_BYTES

# Bytes of weights that are prefetched ahead, and into which cache. Codes of 8 bits leave less time
# between two lines, so the L2 cache gets them first. A CPU that fetches streams itself is asked for
# every other line: 0.98 to 1.05 times the rate without any, on a Zen 4.
_PREFETCHES = {8: ((2048, INTO_L1), (8192, INTO_L2)), 4: ((4096, INTO_L1),)}
_STREAM_PREFETCHES = ((8192, INTO_L2),)


class CodeSums:
    """Emits the products of up to `TASK_ROWS` rows with a block, as `PackedProducts` does.

    Parameters
    ----------
    matrix : CodeMatrix
    """

    def __init__(self, matrix: CodeMatrix):
        self.matrix = matrix

    takes_many_blocks = False  # whether a task may multiply more than one block

    @property
    def unused_rows(self) -> frozenset[str]:
        """Arguments of rows that kernels do without."""
        both = {"var_x_scales", "var_x_sums"}
        return frozenset() if self.matrix.multiplies_codes else frozenset(both)

    def match_rows(self, n, dtype: str, x, x_scales, x_sums) -> tuple:
        """Match the arguments that hold n rows of activations.

        They are the results of `row_codes.encode_rows` where codes are multiplied, or numbers.
        """
        matrix, target = self.matrix, self.matrix.target
        if not matrix.multiplies_codes:
            return (matcher(target, dtype)(x, n, matrix.in_features),)
        codes = matcher(target, "uint8")(x, n, matrix.num_groups, ROW_BYTES)
        scales = match_float32(x_scales, n, matrix.num_groups)
        return codes, scales, match_int32(x_sums, n, matrix.num_groups)

    def blocks_per_task(self, row_tasks):
        """Return how many blocks one task multiplies with its rows."""
        return 1

    def begin(self, x, weight) -> None:
        """Name the buffers of the rows and of the packed weights, where they are matched."""
        self.x, self.weight = x, weight

    def open_scope(self) -> None:
        """Open the scope in which products can be emitted, for the rest of a kernel."""
        opened(self.scope())

    def scope(self):
        """Return that scope."""
        return import_llvm(ALIGN_STACK, *llvm_helpers(self.matrix))

    @contextmanager
    def task(self, count, row_of: Callable) -> Iterator[Callable]:
        """Emit what the rows of a task need around its products, as `PackedProducts.task` does."""

        def sums(block):
            align_stack()
            buffer = T.alloc_buffer((TASK_ROWS, self.matrix.width), F32)
            self._add_vectors(buffer, block, count, row_of)
            return buffer

        yield sums

    def _add_vectors(self, sums, block, count, row_of: Callable) -> None:
        """Emit the products with a block, whose sums are in vector registers."""
        matrix = self.matrix
        products = products_of(matrix)(matrix, self.weight, self.x, TASK_ROWS, row_of)
        with ExitStack() as stack:
            for rows in products.few_rows:
                stack.enter_context(T.If(count == T.int64(rows)))
                with T.Then():
                    self._add_few(products, sums, block, [row_of(r) for r in range(rows)])
                stack.enter_context(T.Else())
            self._add_many(products, sums, block, count)

    def _add_many(self, products, sums, block, count) -> None:
        """Add the products with any number of rows, tile by tile."""
        lanes = self.matrix.target.lanes
        with T.serial(count) as row:
            for v in range(self.matrix.vectors):
                store(sums, (row, v * lanes), lanes, constant(0.0, lanes))

        def part(group):
            products.begin_part(block, group, count)
            for_tiles(count, lambda row, rows: products.add_tile(sums, row, rows, block, group))

        self._for_parts(products, block, part)

    def _add_few(self, products, sums, block, rows: list) -> None:
        """Add the products with one or two rows of x, whose sums stay in registers."""
        lanes = self.matrix.target.lanes
        rows = [temp(T.cast(row, "int64"), 1, "int64") for row in rows]
        totals = {
            at: Register(lanes, init=constant(0.0, lanes))
            for at in np.ndindex(len(rows), self.matrix.vectors)
        }
        self._for_parts(products, block, lambda group: products.add_few(totals, rows, block, group))
        for (r, v), total in totals.items():
            store(sums, (r, v * lanes), lanes, total.get())

    def _for_parts(self, products, block, body: Callable) -> None:
        """Emit ``body(group)`` for the first group of each part, and prefetch weights."""
        _, num_groups, group_bytes = self.matrix.shape
        part, fetches_streams = products.num_groups, self.matrix.target.fetches_streams
        prefetches = _PREFETCHES[self.matrix.format.bits]
        if fetches_streams:
            prefetches = _STREAM_PREFETCHES
        starts = range(0, part * group_bytes, CACHE_LINE_BYTES * (1 + fetches_streams))
        with T.serial(T.int64(-(-num_groups // part))) as i:
            group = temp(i * part, 1, "int64")
            for line, (ahead, cache) in product(starts, prefetches):
                at = group * group_bytes + line + ahead
                prefetch(self.weight, (block, at // group_bytes, at % group_bytes), cache)
            body(group)
