# SPDX-License-Identifier: Apache-2.0
"""Products of rows with quantized weights in the tiles of AMX, as numbers of bfloat16.

The codes of a part of a block become a panel of tiles, once for all rows of a task. Rows arrive as
the integers of `row_codes.encode_rows`, by which fewer rows are multiplied. Converting these back
to bfloat16 restores a number, unless it is so small that its group's scale has rounded it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from tvm.script import tirx as T

from tir_kernels.cpu.isa.bf16 import INT32
from tir_kernels.cpu.isa.matrices.amx import SIDE
from tir_kernels.cpu.isa.matrices.tile_pairs import TilePairs
from tir_kernels.cpu.isa.simd import (
    F32,
    broadcast,
    constant,
    import_llvm,
    ramp,
    store,
    temp,
    vector_type,
)
from tir_kernels.cpu.isa.stack import ALIGN_STACK, align_stack

from ....formats.weight_formats import GROUP
from ..code_matrix import CodeMatrix
from ..code_products import ByteProducts, llvm_helpers
from ..code_sums import CodeSums
from ..packed_products import TASK_ROWS
from .tile_tasks import PART_STEPS, TileTasks

assert GROUP == 2 * SIDE, "a group is a step"
_BYTE = 0xFF


class TileCodeSums(TileTasks, CodeSums):
    """`CodeSums` that multiply many rows in tiles.

    Parameters
    ----------
    matrix : CodeMatrix
        Its codes are multiplied as bytes where rows are few.
    """

    matrix: CodeMatrix

    def __init__(self, matrix: CodeMatrix):
        super().__init__(matrix)
        self.ops = TilePairs()
        self.num_steps = matrix.num_groups

    def scope(self):
        """Return the scope in which products can be emitted."""
        return import_llvm(ALIGN_STACK, *llvm_helpers(self.matrix), *self.ops.llvm_helpers)

    @contextmanager
    def task(self, count, row_of: Callable) -> Iterator[Callable]:
        """Emit what the rows of a task need around its products, as `PackedProducts.task` does."""
        align_stack()
        with super().task(count, row_of) as sums:
            yield sums

    def _copy_rows(self, rows, count, row_of: Callable) -> None:
        codes, scales, _ = self.x
        with T.serial(count) as row:
            source = temp(row_of(row), 1, "int64")
            with T.serial(T.int64(self.num_steps)) as group:
                scale = broadcast(temp(scales[source, group]), SIDE)

                def integers(first: int, group=group, source=source):
                    data = codes[source, group, ramp(first, SIDE)]
                    signed = T.reinterpret(vector_type("int8", SIDE), data)
                    return T.cast(signed, vector_type(INT32, SIDE))

                halves = []
                for first in range(0, GROUP, SIDE):
                    high, low = integers(first), integers(GROUP + first)
                    value = high * broadcast(T.int32(256), SIDE) + low
                    halves.append(temp(T.cast(value, vector_type(F32, SIDE)) * scale, SIDE))
                store(rows, (group, row, 0), SIDE, self.ops.round(*halves), INT32)

    def _tiles_of(self, block, first, length) -> Callable:
        width = self.matrix.width
        panel = T.alloc_buffer((PART_STEPS, SIDE, width), INT32)
        products = ByteProducts(self.matrix, self.weight, self.x, TASK_ROWS, lambda row: row)
        with T.serial(length) as step:
            group = temp(first + step, 1, "int64")
            for v in range(self.matrix.vectors):
                self._widen(panel, products, block, group, step, v)
        return lambda step, column: (panel, (step - first, 0, column), width)

    def _widen(self, panel, products: ByteProducts, block, group, step, v: int) -> None:
        """Convert the codes of a group of a vector of output features to a step of the panel."""
        scale = products.scale(block, group, v)
        if self.matrix.format.has_minima:
            offset = products.minimum(block, group, v)
        else:
            offset = temp(scale * constant(-self.matrix.format.zero, SIDE), SIDE)

        def number(dword, i: int):
            code = T.shift_right(dword, broadcast(T.int32(8 * i), SIDE)) if i else dword
            code = T.bitwise_and(code, broadcast(T.int32(_BYTE), SIDE))
            return temp(T.cast(code, vector_type(F32, SIDE)) * scale + offset, SIDE)

        for at, dword in products.dwords_of_group(block, group, v):
            for i in (0, 2):
                pairs = self.ops.repack([number(dword, i), number(dword, i + 1)])
                store(panel, (step, 2 * at + i // 2, v * SIDE), SIDE, pairs, INT32)
