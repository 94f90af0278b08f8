# SPDX-License-Identifier: Apache-2.0
"""Numbers as signed integers of 16 bits in two bytes, for byte dot products.

``n = high * 256 + low``, both signed. The sums of the high bytes and those of the low ones are put
together at the end. Sums wrap around modulo 2**32, so only what comes out at the end has to fit.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from tvm.script import tirx as T

from ....script import inline
from .. import simd
from ..shuffles import INT32, next_power_of_two, reduce_each, transpose
from ..simd import (
    F32,
    broadcast,
    constant,
    fused_multiply_add,
    index_temp,
    load,
    shuffle,
    store,
    temp,
    vector_type,
)

MOST = 32639.0  # 127 * 256 + 127: the largest number of two signed bytes


@T.meta_class
class TwoBytes:
    """Sets of rows of numbers as two signed bytes: ``[four rows, high or low, dword, row]``.

    A dword has the bytes of four numbers of a row. The same dword of four rows lies side by side,
    as four rows are narrowed together.

    Parameters
    ----------
    dots : byte dot products
    num_sets : int
    rows : int
        Rows of a set.
    width : int
        Numbers of a row.
    zero : int
        The code that stands for zero.
    num_segments : int, optional
        Parts of a row that are multiplied apart, all of the same multiple of 16 numbers.

    Attributes
    ----------
    scale : float32 ``[row of all sets]``
    offsets : int32 ``[segment, row of all sets]``: what codes of zero add to its products, negated
    """

    def __init__(
        self, dots, num_sets: int, rows: int, width: int, zero: int, *, num_segments: int = 1
    ):
        self.dots, self.rows, self.zero = dots, rows, zero
        self.lanes, self.wide = dots.lanes, vector_type("uint32", dots.lanes)
        self.starts = range(0, width, self.lanes)
        self.vectors_per_segment = len(self.starts) // num_segments
        self.fours = -(-rows // 4)  # of a set
        rest = rows % self.lanes  # which a vector of a power of two lanes stores
        self.stride = rows - rest + (next_power_of_two(rest) if rest else 0)
        self.dwords = T.alloc_buffer((num_sets * self.fours, *self._shape(width)), INT32)
        self.scale = T.alloc_buffer((num_sets * self.stride,), F32)
        self.inverse = T.alloc_buffer((num_sets * self.stride,), F32)
        self.offsets = T.alloc_buffer((num_segments, num_sets * self.stride), INT32)

    @staticmethod
    def _shape(width: int) -> tuple[int, int, int]:
        """Return the shape of the dwords of four rows."""
        return 2, width // 4, 4

    def index(self, of_set, row: int):
        """Return the index of a row of a set in `scale` and in a segment of `offsets`."""
        return of_set * self.stride + row

    def dword(self, of_set, row: int, is_low: int, dword):
        """Four bytes of a row of a set."""
        at = of_set * self.fours + row // 4, is_low, dword, 0
        return self.dots.of_four(self.dwords, at, row % 4)

    def set_rows(self, of_set, source: Callable) -> None:
        """Take the numbers ``source(row, start)`` of the rows of a set.

        `source` gives float32 vectors of `lanes` numbers, and is evaluated twice. A row of which
        some are NaN or infinite has the scale NaN.
        """
        for first in range(0, self.rows, self.lanes):
            rows = range(first, min(first + self.lanes, self.rows))
            at, lanes = (index_temp(self.index(of_set, first)),), next_power_of_two(len(rows))
            scale, inverse = row_scale(self._largest(rows, source), lanes)
            store(self.scale, at, lanes, scale)
            store(self.inverse, at, lanes, inverse)
            totals = []
            for four in range(first, rows.stop, 4):
                totals += self._set_four(of_set, range(four, min(four + 4, rows.stop)), source)
            offset = self.vectors_per_segment * self.lanes * _OFFSET % (1 << 32)
            for segment, sums in enumerate(zip(*totals, strict=True)):
                total = reduce_each(sums, self.lanes, simd.add, "uint32")
                total = total - broadcast(T.uint32(offset), lanes)
                total = temp(T.reinterpret(vector_type(INT32, lanes), total), lanes, INT32)
                offsets = total * broadcast(T.int32(-self.zero), lanes)
                store(self.offsets, (segment, *at), lanes, offsets, INT32)

    def _largest(self, rows: range, source: Callable):
        """The bits of the largest magnitude of each row."""
        magnitude, wide = broadcast(T.uint32(0x7FFFFFFF), self.lanes), self.wide
        largest = []
        for i in rows:
            found = None
            for start in self.starts:
                bits = T.bitwise_and(T.reinterpret(wide, source(i, start)), magnitude)
                found = bits if found is None else T.max(found, bits)
            largest.append(temp(found, self.lanes, "uint32"))
        bits = reduce_each(largest, self.lanes, simd.maximum, "uint32")
        return temp(bits, next_power_of_two(len(rows)), "uint32")

    def _set_four(self, of_set, rows: range, source: Callable) -> list[list]:
        """Take up to four rows; return the sums of their numbers plus `_OFFSET`, by segment."""
        at = [self.index(of_set, i) for i in rows]
        factors = [temp(broadcast(self.inverse[i], self.lanes), self.lanes) for i in at]
        totals: list[list] = [[] for _ in rows]
        for number, start in enumerate(self.starts):
            four = []
            for i, factor, sums in zip(rows, factors, totals, strict=True):
                rounder = constant(_ROUNDER, self.lanes)
                value = fused_multiply_add(source(i, start), factor, rounder, self.lanes)
                bits = temp(T.reinterpret(self.wide, value), self.lanes, "uint32")
                four.append(bits)
                if number % self.vectors_per_segment:
                    sums[-1] = temp(sums[-1] + bits, self.lanes, "uint32")
                else:
                    sums.append(bits)
            four += four[-1:] * (4 - len(four))  # missing rows repeat the last one
            of_four = of_set * self.fours + rows[0] // 4
            self._put(of_four, start // 4, *_bytes_of_four(four, self.lanes))
        return totals

    def _put(self, four, dword: int, high, low) -> None:
        """Keep the bytes of some numbers of four rows."""
        for n, dwords in enumerate((high, low)):
            store(self.dwords, (four, n, dword, 0), self.lanes, dwords, INT32)


@T.meta_class
class VectorBytes(TwoBytes):
    """`TwoBytes` whose dwords fill vectors: the instruction takes these as operands in memory.

    Broadcasts would be a quarter of the instructions otherwise, and take registers.
    """

    def __init__(
        self, dots, num_sets: int, rows: int, width: int, zero: int, *, num_segments: int = 1
    ):
        super().__init__(dots, num_sets, rows, width, zero, num_segments=num_segments)
        self.num_dwords = width // 4
        shape = (num_sets, rows, self.num_dwords, 2, self.lanes)
        self.vectors = T.alloc_buffer(shape, INT32)

    @inline
    def set_rows(self, of_set, source):
        """Take the numbers ``source(row, start)`` of the rows of a set."""
        TwoBytes.set_rows(self, of_set, source)
        for i in range(self.num_dwords):
            self._fill_vectors(of_set, i)

    def _fill_vectors(self, of_set, i) -> None:
        for row in range(self.rows):
            for is_low in range(2):
                value = broadcast(TwoBytes.dword(self, of_set, row, is_low, i), self.lanes)
                store(self.vectors, (of_set, row, i, is_low, 0), self.lanes, value, INT32)

    def dword(self, of_set, row: int, is_low: int, dword):
        """Four bytes of a row of a set, in each lane."""
        return load(self.vectors, (of_set, row, dword, is_low, 0), self.lanes, INT32)


@T.meta_class
class MatrixBytes(TwoBytes):
    """`TwoBytes` as matrices: ``[four rows, two dwords, row, high or low and dword]``.

    A matrix has the high bytes of eight numbers, then the low ones.
    """

    @staticmethod
    def _shape(width: int) -> tuple[int, int, int]:
        return width // 8, 4, 4

    def _put(self, four, dword: int, high, low) -> None:
        """Keep the bytes of some numbers of four rows, two dwords at a time."""
        if dword % 2 == 0:
            self.held = high, low
            return
        for row, value in enumerate(transpose([self.held[0], high, self.held[1], low], INT32)):
            store(self.dwords, (four, dword // 2, row, 0), 4, value, INT32)

    def matrix(self, of_set, row: int, dword):
        """The bytes of eight numbers of a row, from an even dword on."""
        at = of_set * self.fours + row // 4, dword // 2, row % 4, 0
        return load(self.dwords, at, 4, INT32)


# Added to a small number, it leaves in the low bits the nearest whole number plus 128: with that,
# the high one of its two bytes is the one that makes the low one signed.
_ROUNDER = 1.5 * 2**23 + 128
_OFFSET = 0x4B400000 + 128  # the bits of _ROUNDER


def _bytes_of_four(rows: Sequence, lanes: int) -> tuple:
    """The high and the low bytes of four rows of `lanes` numbers, as `TwoBytes` keeps them.

    Rows are bits of numbers plus `_ROUNDER`. A result has a dword with the first four numbers of
    each row, then one with the next four of each, and so on.
    """

    def shift(value, count: int):
        by = broadcast(T.uint32(abs(count)), lanes)
        return T.shift_left(value, by) if count > 0 else T.shift_right(value, by)

    def either(even, odd, mask: int):
        """The bits of `mask` from `even`, the others from `odd`."""
        even = T.bitwise_and(even, broadcast(T.uint32(mask), lanes))
        odd = T.bitwise_and(odd, broadcast(T.uint32(mask ^ 0xFFFFFFFF), lanes))
        return temp(T.bitwise_or(even, odd), lanes, "uint32")

    a, b, c, d = rows
    ab, cd = (either(even, shift(odd, 16), 0xFFFF) for even, odd in ((a, b), (c, d)))
    high = either(shift(ab, -8), cd, 0x00FF00FF)
    low = either(ab, shift(cd, 8), 0x00FF00FF)
    low = T.bitwise_xor(low, broadcast(T.uint32(0x80808080), lanes))  # minus the 128
    place = (0, 2, 1, 3)  # of the byte of each row in a dword
    order = [
        first + 4 * number + place[row]
        for first in range(0, 4 * lanes, 16)
        for row in range(4)
        for number in range(4)
    ]

    def in_order(dwords):
        value = temp(T.reinterpret(f"uint8x{4 * lanes}", dwords), 4 * lanes, "uint8")
        return T.reinterpret(f"int32x{lanes}", shuffle([value], order))

    return in_order(high), in_order(low)


def row_scale(bits, lanes: int):
    """Scales of rows and their inverses, by the bits of the largest magnitudes."""
    number = vector_type(F32, lanes)
    is_finite = bits < broadcast(T.uint32(0x7F800000), lanes)
    scale = temp(T.reinterpret(number, bits) * constant(1 / MOST, lanes), lanes)
    is_known = T.And(is_finite, scale >= constant(2.0**-126, lanes))
    nan = T.reinterpret(number, broadcast(T.uint32(0x7FC00000), lanes))
    zero, one = constant(0.0, lanes), constant(1.0, lanes)
    inverse = T.Select(is_known, one / T.Select(is_known, scale, one), zero)
    scale = T.Select(is_known, scale, T.Select(is_finite, zero, nan))
    return temp(scale, lanes), temp(inverse, lanes)


def put_together(high, low, lanes: int):
    """The sums of products with numbers of two bytes, from those with either byte."""
    return T.shift_left(high, broadcast(T.int32(8), lanes)) + low
