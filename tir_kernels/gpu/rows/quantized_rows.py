# SPDX-License-Identifier: Apache-2.0
"""Rows of float32 values quantized into pages, and read back, by a warp each.

The bits of a number, shifted left by one, with the sign after them, order numbers by magnitude,
NaN above all. So one maximum finds the value that decides a scale, and whether all are finite.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from tvm.script import tirx as T

from ...codec import Codec
from ...layout import QuantizedPages
from ...semantics.hadamard import k_parts
from ..isa import isa_of
from ..registers import F32, I32, U32, WARP, Registers, index_temp, temp
from ..tiles.rotations import blocks_of, rotate_registers

RUN = 4  # columns that a lane has side by side: their codes are a word
_INFINITE = 0xFF000000  # the key of infinities; that of NaN is larger
_SMALLEST_NORMAL = 2.0**-126


class Runs:
    """Which columns of a row a lane has.

    Parameters
    ----------
    begin, end : int
        Columns that are shared out.
    length : int
        Columns of a run.
    lane : int32 expression
    """

    def __init__(self, begin: int, end: int, length: int, lane):
        self.begin, self.length, self.count = begin, length, (end - begin) // length
        self.turns, self.lane = -(-self.count // WARP), lane
        self.values = Registers(self.turns * length, F32, "values")

    def column(self, turn: int):
        """First column of the lane's run of a turn."""
        return self.begin + (turn * WARP + self.lane) * self.length

    def each(self) -> Iterator[tuple]:
        """Yield turn and column of the runs that there are."""
        for turn in range(self.turns):
            column = index_temp(self.column(turn))
            if (turn + 1) * WARP <= self.count:
                yield turn, column
            else:
                with T.If(turn * WARP + self.lane < self.count), T.Then():
                    yield turn, column

    def load(self, rows, row: Sequence) -> None:
        """Fill the registers by ``rows.load_run``; lanes without a run have zeros."""
        self.values.fill(T.float32(0))
        for turn, column in self.each():
            loaded = rows.load_run(row, column, self.length)
            for i in range(self.length):
                self.values[turn * self.length + i] = loaded[i]


@T.meta_class
class QuantizedRows:
    """Quantizes rows of values into pages, and reads them back.

    Parameters
    ----------
    pages : QuantizedPages
    static : float32 Buffer ``[2, Hk]``, optional
        Scales of K and V of each head; None: each group of a row has one of its own.
    """

    def __init__(self, pages: QuantizedPages, static=None):
        self.pages, self.codec, self.static = pages, pages.codec, static
        self.isa = isa_of(pages.spec.target)

    def quantize(self, row: Sequence, rows, source_row: Sequence, worker) -> None:
        """Quantize ``rows.load_run(source_row, column, count)`` into row `row`."""
        pages, lane = self.pages, worker.lane()
        if self.codec.is_packed:
            self._quantize_packed(row, rows, source_row, lane, *worker.warp_scratch())
            return
        for group, (begin, end) in enumerate(pages.groups):
            runs = Runs(begin, end, RUN, lane)
            runs.load(rows, source_row)
            given = None if self.static is None else self.static[row[1], row[2]]
            scale = _Scale(self.isa, self.codec, _largest(self.isa, runs.values, WARP), given)
            with T.If(lane == 0), T.Then():
                scale.store(pages, row, group)
            for turn, column in runs.each():
                codes = [scale.code(runs.values[turn * RUN + i]) for i in range(RUN)]
                word = codes[0]
                for i in range(1, RUN):
                    word = T.bitwise_or(word, T.shift_left(codes[i], T.uint32(8 * i)))
                self.isa.store_words([word], pages.codes, (*row, column), 4)

    def _quantize_packed(self, row, rows, source_row, lane, room, start) -> None:
        """Quantize to packed codes: shared memory joins those of a byte, which are apart."""
        pages, codec = self.pages, self.codec
        for part in k_parts(pages.spec):
            for begin, size in blocks_of(*part):
                length = size // WARP
                runs = Runs(begin, begin + size, length, lane)
                runs.load(rows, source_row)
                rotate_registers(self.isa, runs.values, lane)
                # A group is of all lanes, or of some of them side by side.
                lanes = codec.group_size // length if length < codec.group_size else 1
                scale = _Scale(self.isa, codec, _largest(self.isa, runs.values, lanes))
                column = index_temp(runs.column(0))
                for i in range(length):
                    code = T.reinterpret(F32, scale.code(runs.values[i]))
                    T.buffer_store(room, code, [0, start + column + i])
                scale.fit(runs.values, lanes)
                with T.If(T.truncmod(lane, lanes) == 0), T.Then():
                    scale.store(pages, row, T.truncdiv(column, codec.group_size))
        self.isa.sync_warp()
        (plane,) = codec.planes
        num_bytes = plane.num_bytes(pages.spec.qk_head_dim)
        for _, column in Runs(0, num_bytes, RUN, lane).each():
            word = Registers(1, U32, "word")
            word[0] = T.uint32(0)
            for side in range(plane.columns_per_byte):
                for i in range(RUN):
                    code = T.reinterpret(U32, room[0, start + side * num_bytes + column + i])
                    bits = T.uint32(8 * i + plane.num_bits * side)
                    word[0] = T.bitwise_or(word[0], T.shift_left(code, bits))
            self.isa.store_words(word, pages.codes, (*row, column), 4)
        self.isa.sync_warp()

    def dequantize(self, row: Sequence, sink, sink_row: Sequence, worker) -> None:
        """Write the values that row `row` stands for, rounded to the type of `sink`."""
        spec, lane = self.pages.spec, worker.lane()
        parts = [(begin, end, RUN) for begin, end in self.pages.groups]
        if self.codec.has_hadamard:
            blocks = [block for part in k_parts(spec) for block in blocks_of(*part)]
            parts = [(begin, begin + size, size // WARP) for begin, size in blocks]
        for begin, end, length in parts:
            runs = Runs(begin, end, length, lane)
            runs.load(self, row)
            if self.codec.has_hadamard:
                rotate_registers(self.isa, runs.values, lane)
            for turn, column in runs.each():
                values = Registers(length, F32, "values")
                for i in range(length):
                    values[i] = runs.values[turn * length + i]
                self.isa.store_floats(sink, (*sink_row, column), values)

    def load_run(self, row: Sequence, column, count: int) -> Registers:
        """Load the values that some codes stand for; they are rotated where the codec rotates."""
        pages, codec = self.pages, self.codec
        values, scale = Registers(count, F32, "values"), pages.scale(row, pages.group_of(column))
        scale = temp(scale)
        for i in range(count):
            if codec.is_packed:
                value = T.cast(self._load_packed(row, column + i), F32)
            elif codec.storage_dtype == "int8":
                value = T.cast(pages.codes[(*row, column + i)], F32)
            else:
                value = _float_of(T.cast(pages.codes[(*row, column + i)], U32))
            values[i] = value * scale
        return values

    def _load_packed(self, row: Sequence, column):
        """The packed code of a column: int32."""
        (plane,) = self.codec.planes
        num_bytes = plane.num_bytes(self.pages.spec.qk_head_dim)
        byte = self.pages.codes[(*row, T.truncmod(column, num_bytes))]
        shift = T.if_then_else(column < num_bytes, T.uint32(0), T.uint32(plane.num_bits))
        bits = T.bitwise_and(T.shift_right(T.cast(byte, U32), shift), T.uint32(plane.mask))
        return T.cast(bits, I32) - -self.codec.lowest


def _largest(isa, values: Registers, lanes: int):
    """The key of the value of the largest magnitude that some lanes have: uint32."""
    largest = Registers(1, U32, "largest")
    largest[0] = T.uint32(0)
    for i in range(values.count):
        bits = temp(T.reinterpret(U32, values[i]), 1, U32)
        key = T.bitwise_or(T.shift_left(bits, T.uint32(1)), T.shift_right(bits, T.uint32(31)))
        largest[0] = T.max(largest[0], key)
    mask = 1
    while mask < lanes:
        largest[0] = T.max(largest[0], isa.shuffle_xor(largest[0], mask))
        mask *= 2
    return largest[0]


class _Scale:
    """The scale of a group whose largest value has the key `key`, and the codes of its values.

    It is `given` if there is such a one, but of groups that are not finite.
    """

    def __init__(self, isa, codec: Codec, key, given=None):
        self.isa, self.codec = isa, codec
        is_finite = key < T.uint32(_INFINITE)
        magnitude = T.shift_right(key, T.uint32(1))
        sign = T.shift_left(T.bitwise_and(key, T.uint32(1)), T.uint32(31))
        extreme = magnitude if codec.limit > 0 else T.bitwise_or(magnitude, sign)
        quotient = self.isa.divide(T.reinterpret(F32, extreme), T.float32(codec.limit))
        bits = self._rounded(quotient if given is None else given)
        exponent = T.bitwise_and(bits, T.uint32(0x7F800000))
        self.is_known = temp(T.cast(T.And(is_finite, exponent != T.uint32(0)), I32), 1, I32)
        not_a_number = T.if_then_else(is_finite, T.uint32(0), T.uint32(0x7FC00000))
        is_known = self.is_known != 0
        self.bits = temp(T.if_then_else(is_known, bits, not_a_number), 1, U32)
        divisor = T.if_then_else(is_known, T.reinterpret(F32, bits), T.float32(1))
        self.inverse = self.isa.divide(T.float32(1), temp(divisor))

    def store(self, pages: QuantizedPages, row: Sequence, group) -> None:
        """Store it as the scale of a group of a row."""
        if self.codec.scale_dtype == "bfloat16":
            bits = T.cast(T.shift_right(self.bits, T.uint32(16)), "uint16")
        else:
            bits = T.reinterpret(F32, self.bits)
        T.buffer_store(pages.scales, bits, [*row, group])

    def fit(self, values: Registers, lanes: int) -> None:
        """Replace the scale by the one that fits the codes of the values of some lanes best."""
        sums = Registers(2, F32, "sums")
        sums.fill(T.float32(0))
        for i in range(values.count):
            scaled = temp(self._scaled(values[i]))
            code = temp(self._nearest(scaled))
            sums[0] = self.isa.fused_multiply_add(code, scaled, sums[0])
            sums[1] = self.isa.fused_multiply_add(code, code, sums[1])
        mask = 1
        while mask < lanes:
            for n in range(2):
                sums[n] = sums[n] + self.isa.shuffle_xor(sums[n], mask)
            mask *= 2
        is_known = self.is_known != 0
        ratio = self.isa.divide(sums[0], temp(T.if_then_else(is_known, sums[1], T.float32(1))))
        fitted = self._rounded(T.reinterpret(F32, self.bits) * ratio)
        exponent = T.bitwise_and(fitted, T.uint32(0x7F800000))
        is_fitted = T.And(is_known, exponent != T.uint32(0))
        self.bits = temp(T.if_then_else(is_fitted, fitted, self.bits), 1, U32)

    def code(self, value):
        """The bits of the code that is nearest to a value of the group: uint32."""
        scaled = self._scaled(value)
        if not self.codec.is_integer:
            return _float_code(self.isa, scaled)
        code = T.cast(self._nearest(scaled), I32)
        if self.codec.is_packed:
            code = code - self.codec.lowest
        return temp(T.cast(T.bitwise_and(code, 0xFF), U32), 1, U32)

    def _scaled(self, value):
        """A value in units of the scale that its code is chosen by."""
        value = T.if_then_else(self.is_known != 0, value, T.float32(0))
        return self.isa.fused_multiply_add(temp(value), self.inverse, T.float32(0))

    def _nearest(self, scaled):
        """The nearest integer among the codes, as a number."""
        lowest, highest = self.codec.lowest, self.codec.highest
        return T.min(T.max(self.isa.rint(scaled), T.float32(lowest)), T.float32(highest))

    def _rounded(self, scale):
        """The bits of a scale rounded to the codec's type, as a float32 number: uint32."""
        bits = temp(T.reinterpret(U32, scale), 1, U32)
        if self.codec.scale_dtype == "bfloat16":
            odd = T.bitwise_and(T.shift_right(bits, T.uint32(16)), T.uint32(1))
            bits = T.bitwise_and(bits + T.uint32(0x7FFF) + odd, T.uint32(0xFFFF0000))
            bits = temp(bits, 1, U32)
        return bits


def _float_code(isa, value):
    """The nearest number with four bits of exponent and three of mantissa."""
    bits = temp(T.reinterpret(U32, value), 1, U32)
    sign = T.bitwise_and(T.shift_right(bits, T.uint32(24)), T.uint32(0x80))
    size = T.reinterpret(F32, T.bitwise_and(bits, T.uint32(0x7FFFFFFF)))
    size = temp(T.min(size, T.float32(448.0)))
    magnitude = temp(T.reinterpret(U32, size), 1, U32)
    odd = T.bitwise_and(T.shift_right(magnitude, T.uint32(20)), T.uint32(1))
    rounded = T.shift_right(magnitude + T.uint32(0x7FFFF) + odd, T.uint32(20))
    normal = rounded - T.uint32((127 - 7) << 3)
    small = T.cast(T.cast(isa.rint(size * T.float32(512.0)), I32), U32)
    code = T.if_then_else(size < T.float32(2.0**-6), small, normal)
    return temp(T.bitwise_or(code, sign), 1, U32)


def _float_of(code):
    """The number that an 8-bit floating-point code stands for."""
    code = temp(code, 1, U32)
    sign = T.shift_left(T.bitwise_and(code, T.uint32(0x80)), T.uint32(24))
    size = T.bitwise_and(code, T.uint32(0x7F))
    normal = T.reinterpret(F32, T.shift_left(size + T.uint32((127 - 7) << 3), T.uint32(20)))
    small = T.cast(T.cast(size, I32), F32) * T.float32(2.0**-9)
    value = temp(T.if_then_else(size < T.uint32(8), small, normal))
    return T.reinterpret(F32, T.bitwise_or(T.reinterpret(U32, value), sign))
