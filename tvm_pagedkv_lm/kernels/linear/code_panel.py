# SPDX-License-Identifier: Apache-2.0
"""What all products of rows of activations with a block of quantized weights have in common."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from tvm.script import tirx as T

from tir_kernels.cpu.isa.simd import F32, broadcast, load, ramp, store, temp, vector_type
from tir_kernels.spec import STORED_ITEMSIZE

from . import mxfp4_kernels as mxfp4
from .code_matrix import CodeMatrix


@T.meta_class
class Panel:
    """Reads the packed weights of a block."""

    def __init__(self, matrix: CodeMatrix, weight):
        self.matrix, self.weight = matrix, weight

    def scale(self, block, group, v: int):
        """The scales of a vector of output features, as float32."""
        return self._halves(block, group, self.matrix.code_bytes, v)

    def minimum(self, block, group, v: int):
        """Their minima."""
        first = self.matrix.code_bytes + self.matrix.scale_bytes
        return self._halves(block, group, first, v)

    def _halves(self, block, group, first: int, v: int):
        lanes, dtype = self.matrix.target.lanes, self.matrix.scale_dtype
        size = lanes * STORED_ITEMSIZE[dtype]
        data = self.weight[block, group, ramp(first + v * size, size)]
        if self.matrix.format.is_mxfp4:
            return temp(mxfp4.float_scales(data, lanes), lanes)
        value = T.reinterpret(vector_type(dtype, lanes), data)
        return temp(T.cast(value, vector_type(F32, lanes)), lanes)


@T.meta_class
class IntegerPanel(Panel):
    """Products of codes with rows of integers, which have a scale for each group.

    Parameters
    ----------
    matrix : CodeMatrix
    weight : buffer
    x : (codes, scales, sums)
        Rows as `row_codes.encode_rows` writes them.
    row_of : callable
        The row of x that a row of the task comes from.
    """

    def __init__(self, matrix: CodeMatrix, weight, x, row_of: Callable):
        super().__init__(matrix, weight)
        self.row_of, self.lanes = row_of, matrix.target.lanes
        self.x_codes, self.x_scales, self.x_sums = x

    def dwords(self, block, group, element):
        """A vector of dwords of the packed weights."""
        data = self.weight[block, group, ramp(element * 4, self.lanes * 4)]
        return T.reinterpret(vector_type("int32", self.lanes), data)

    def x_dword(self, row, group, at):
        """Four bytes of a row as a dword."""
        value = T.reinterpret("int32", self.x_codes[row, group, ramp(at, 4)])
        return temp(value, 1, "int32")

    def integer(self, value: int):
        """A constant in every lane."""
        return broadcast(T.int32(value), self.lanes)

    def offset(self, row, group):
        """What the code of the number zero adds to the products with a row, negated."""
        return self.x_sums[row, group] * T.int32(-self.matrix.format.zero)

    def add_totals(self, sums: dict, x_rows: list, part, totals) -> None:
        """Add the products of integers, times their scales, to ``sums[row, vector]``."""
        block, group = part
        for v in range(self.matrix.vectors):
            scale = self.scale(block, group, v)
            minimum = self.minimum(block, group, v) if self.matrix.format.has_minima else None
            for r, x_row in enumerate(x_rows):
                x_scale = temp(self.x_scales[x_row, group])
                number = T.cast(totals[r, v], vector_type(F32, self.lanes))
                total = sums[r, v].get() + number * (scale * broadcast(x_scale, self.lanes))
                if minimum is not None:
                    x_sum = x_scale * T.cast(self.x_sums[x_row, group], F32)
                    total = total + minimum * broadcast(x_sum, self.lanes)
                sums[r, v].set(total)


class StoredSums(NamedTuple):
    """A vector of sums in a buffer, with the methods of `Register`."""

    buffer: object
    at: tuple
    lanes: int

    def get(self):
        return load(self.buffer, self.at, self.lanes)

    def set(self, value) -> None:
        store(self.buffer, self.at, self.lanes, value)
