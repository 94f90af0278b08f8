# SPDX-License-Identifier: Apache-2.0
"""Products of rows of activations with a block of quantized weights, some groups at a time.

`ByteProducts` and `WordProducts` multiply the codes, `FloatProducts` the numbers that they stand
for. All keep a panel of weights, and add to the sums of a tile of rows.
"""

from collections.abc import Callable, Iterator
from itertools import product

from tvm.script import tirx as T

from tir_kernels.cpu.isa.bytes import words
from tir_kernels.cpu.isa.bytes.dots import UnsignedDots
from tir_kernels.cpu.isa.shuffles import INT32
from tir_kernels.cpu.isa.simd import (
    F32,
    Register,
    broadcast,
    constant,
    load,
    ramp,
    store,
    temp,
    vector_type,
)

from ...formats.weight_formats import GROUP
from . import mxfp4_kernels as mxfp4
from .code_matrix import CodeMatrix
from .code_panel import IntegerPanel, Panel, StoredSums
from .packed_products import widen
from .word_products import WordProducts

LANES = UnsignedDots.lanes
_DWORDS = GROUP // 4
_FLOAT_GROUPS = 4  # of a panel of float32 numbers


@T.meta_class
class ByteProducts(IntegerPanel):
    """Byte dot products of codes; a panel has the codes of a group, a byte each.

    Parameters
    ----------
    matrix : CodeMatrix
    weight : buffer
    x : (codes, scales, sums)
        Rows as `row_codes.encode_rows` writes them.
    max_rows : int
        Maximum number of rows.
    row_of : callable
        The row of x that a row of the task comes from.
    """

    num_groups = 1  # of a panel
    few_rows = (1, 2)  # for which there is `add_few`

    def __init__(self, matrix: CodeMatrix, weight, x, max_rows: int, row_of: Callable):
        super().__init__(matrix, weight, x, row_of)
        self.dots = UnsignedDots()
        self.is_packed = matrix.format.bits == 4
        if self.is_packed:
            self.panel = T.alloc_buffer((_DWORDS, matrix.width), INT32)

    def begin_part(self, block, group, count) -> None:
        """Take the codes of a group."""
        if not self.is_packed:
            return
        for dword in range(_DWORDS // 2):
            for v in range(self.matrix.vectors):
                for half, codes in enumerate(self._unpacked(block, group, dword, v)):
                    at = (dword + half * (_DWORDS // 2), v * LANES)
                    store(self.panel, at, LANES, codes, INT32)

    def dwords_of_group(self, block, group, v: int) -> Iterator[tuple]:
        """Yield dwords of codes of a vector of output features, and which of a group's they are."""
        halves = 2 if self.is_packed else 1
        for dword in range(_DWORDS // halves):
            for half, codes in enumerate(self._unpacked(block, group, dword, v)):
                yield dword + half * (_DWORDS // halves), codes

    def _unpacked(self, block, group, dword, v: int) -> list:
        """A vector of dwords of codes, or two where bytes hold two: dwords of both halves."""
        codes = self.dwords(block, group, dword * self.matrix.width + v * LANES)
        codes = temp(codes, LANES, INT32)
        if not self.is_packed:
            return [codes]
        halves = [codes, T.shift_right(codes, self.integer(4))]
        halves = [T.bitwise_and(x, self.integer(0x0F0F0F0F)) for x in halves]
        if self.matrix.format.is_mxfp4:
            halves = [mxfp4.unsigned_codes(x, LANES) for x in halves]
        return [temp(x, LANES, INT32) for x in halves]

    def _codes(self, block, group, dword, v: int):
        if self.is_packed:
            return load(self.panel, (dword, v * LANES), LANES, INT32)
        return self.dwords(block, group, dword * self.matrix.width + v * LANES)

    def add_tile(self, sums, row, num_rows: int, block, group) -> None:
        """Add the products with `num_rows` rows to their sums."""
        tile = [(r, v) for r in range(num_rows) for v in range(self.matrix.vectors)]
        totals = {at: Register(LANES, INT32, self.integer(0)) for at in tile}
        rows = [temp(self.row_of(row + r), 1, "int64") for r in range(num_rows)]

        def add_bytes(first: int) -> None:
            with T.serial(_DWORDS) as dword:
                codes = [
                    temp(self._codes(block, group, dword, v), LANES, INT32)
                    for v in range(self.matrix.vectors)
                ]
                for r in range(num_rows):
                    value = self.x_dword(rows[r], group, dword * 4 + first)
                    for v, code in enumerate(codes):
                        totals[r, v].set(self.dots.dot(totals[r, v].get(), code, value))

        add_bytes(0)
        for r in range(num_rows):
            offset = self.offset(rows[r], group)
            for v in range(self.matrix.vectors):
                total = T.shift_left(totals[r, v].get(), self.integer(8))
                if self.matrix.format.zero:
                    total = total + broadcast(offset, LANES)
                totals[r, v].set(total)
        add_bytes(GROUP)
        totals = {at: total.get() for at, total in totals.items()}
        stored = {(r, v): StoredSums(sums, (row + r, v * LANES), LANES) for r, v in tile}
        self.add_totals(stored, rows, (block, group), totals)

    def add_few(self, sums: dict, rows: list, block, group) -> None:
        """Add the products with one or two rows of x to registers ``sums[row, vector]``.

        The codes stay in registers, and each is unpacked once. High and low bytes of a row have
        sums of their own: twice as many chains of dot products, which do not wait for each other.
        """
        halves = 2 if self.is_packed else 1
        vectors, parts = range(self.matrix.vectors), range(2)
        tile = product(parts, range(len(rows)), vectors)
        products = {at: Register(LANES, INT32, self.integer(0)) for at in tile}
        for dword in range(_DWORDS // halves):
            codes = [self._unpacked(block, group, dword, v) for v in vectors]
            for half, (r, row), part in product(range(halves), enumerate(rows), parts):
                at = (dword + half * (_DWORDS // halves)) * 4 + part * GROUP
                value = self.x_dword(row, group, at)
                for v in vectors:
                    total = products[part, r, v]
                    total.set(self.dots.dot(total.get(), codes[v][half], value))
        totals = {}
        for r, row in enumerate(rows):
            for v in vectors:
                high, low = (products[part, r, v].get() for part in parts)
                total = T.shift_left(high, self.integer(8)) + low
                if self.matrix.format.zero:
                    total = total + broadcast(self.offset(row, group), LANES)
                totals[r, v] = total
        self.add_totals(sums, rows, (block, group), totals)


@T.meta_class
class FloatProducts(Panel):
    """Products of float32 numbers; a panel has those of a few groups.

    Parameters
    ----------
    matrix : CodeMatrix
    weight : buffer
    x : (buffer,)
        Rows of any type.
    max_rows, row_of
        As for `ByteProducts`.
    """

    num_groups = _FLOAT_GROUPS
    few_rows = ()

    def __init__(self, matrix: CodeMatrix, weight, x, max_rows: int, row_of: Callable):
        super().__init__(matrix, weight)
        self.row_of = row_of
        (self.x,) = x
        self.lanes = matrix.target.lanes
        depth = self.num_groups * GROUP
        self.panel = T.alloc_buffer((depth, matrix.width), F32)
        self.wide = T.alloc_buffer((max_rows, depth), F32)

    def begin_part(self, block, group, count) -> None:
        """Convert the codes of some groups, and as many columns of the rows."""
        length = self._length(group)
        with T.serial(length // GROUP) as g:
            for v in range(self.matrix.vectors):
                self._convert(block, group, g, v)
        widen(self.x, self.wide, self.row_of, count, group * GROUP, length, self.lanes)

    def _length(self, group):
        """Input features of a part."""
        left = T.int64(self.matrix.num_groups) - group
        return temp(T.min(left, T.int64(self.num_groups)) * GROUP, 1, "int64")

    def _convert(self, block, first_group, g, v: int) -> None:
        """Convert a vector of output features of a group."""
        lanes, width, matrix = self.lanes, self.matrix.width, self.matrix
        group = temp(first_group + g, 1, "int64")
        scale = self.scale(block, group, v)
        offset = None
        if matrix.format.has_minima:
            offset = self.minimum(block, group, v)
        elif not matrix.format.is_mxfp4:
            offset = temp(scale * constant(-matrix.format.zero, lanes), lanes)
        per_byte = 8 // matrix.format.bits
        with T.serial(GROUP // per_byte) as i:
            at = ramp(i * width + v * lanes, lanes)
            data = temp(self.weight[block, group, at], lanes, "uint8")
            for part in range(per_byte):
                code = data
                if per_byte == 2:
                    shifted = T.shift_right(data, broadcast(T.uint8(4 * part), lanes))
                    code = T.bitwise_and(shifted, broadcast(T.uint8(15), lanes))
                # The product is exact, so the sum is rounded once, fused or not.
                if offset is None:
                    value = mxfp4.float_codes(temp(code, lanes, "uint8"), lanes) * scale
                else:
                    value = T.cast(code, vector_type(F32, lanes)) * scale + offset
                row = g * GROUP + i + part * (GROUP // per_byte)
                store(self.panel, (row, v * lanes), lanes, value)

    def add_tile(self, sums, row, num_rows: int, block, group) -> None:
        """Add the products with `num_rows` rows to their sums."""
        lanes, vectors = self.lanes, range(self.matrix.vectors)
        tile = [(r, v) for r in range(num_rows) for v in vectors]
        totals = {
            (r, v): Register(lanes, init=load(sums, (row + r, v * lanes), lanes)) for r, v in tile
        }
        with T.serial(self._length(group)) as k:
            weights = [temp(load(self.panel, (k, v * lanes), lanes), lanes) for v in vectors]
            for r in range(num_rows):
                value = broadcast(temp(self.wide[row + r, k]), lanes)
                for v, weight in enumerate(weights):
                    totals[r, v].fma(value, weight)
        for (r, v), total in totals.items():
            store(sums, (row + r, v * lanes), lanes, total.get())


def llvm_helpers(matrix: CodeMatrix) -> tuple[str, ...]:
    """Return the LLVM functions that the products of a matrix call."""
    if not matrix.multiplies_codes:
        return ()
    dots = UnsignedDots().llvm_helpers if matrix.multiplies_bytes else (words.LLVM_HELPERS,)
    return dots + (mxfp4.llvm_helpers(matrix.target.lanes) if matrix.format.is_mxfp4 else ())


def products_of(matrix: CodeMatrix):
    """Return the class of products for the CPU of a matrix."""
    if matrix.multiplies_words:
        return WordProducts
    return ByteProducts if matrix.multiplies_bytes else FloatProducts
