# SPDX-License-Identifier: Apache-2.0
"""Rows of float32 numbers quantized into pages, and read back.

The bits of a number, shifted left by one, with the sign behind them, order numbers by magnitude,
NaN above all. So one maximum finds the value that decides a scale, and whether all are finite.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from contextlib import nullcontext

from tvm.script import tirx as T

from ... import vectors
from ...codec import Codec
from ...layout import QuantizedPages
from ...semantics.hadamard import block_factor, k_parts
from ...vectors import Chunk
from ..isa.bytes import packing
from ..isa.hadamard import transform
from ..isa.shuffles import next_power_of_two, reduce_each
from ..isa.simd import (
    F32,
    Register,
    add,
    broadcast,
    chunks,
    constant,
    literal,
    load,
    maximum,
    rint,
    shuffle,
    steps,
    store,
    temp,
    vector_type,
)
from .codes import load_values, store_codes, store_packed_codes

VECTORS_AT_ONCE = 8
_INFINITE = 0xFF000000  # the key of infinities; that of NaN is larger
_SMALLEST_NORMAL = 0x00800000  # the bits of 2**-126


@T.meta_class
class QuantizedRows:
    """Quantizes rows of float32 numbers into pages, and reads them back.

    Parameters
    ----------
    pages : QuantizedPages
        Those of the rows' plane.
    static : float32 Buffer ``[2, Hk]``, optional
        Scales of K and V of each head; None: each group of a row has one of its own.
    """

    def __init__(self, pages: QuantizedPages, static=None):
        self.pages, self.codec, self.static = pages, pages.codec, static
        self.can_pack = packing.can_pack(pages.spec.target)
        self.factors = _factors(pages)

    def quantize(self, numbers, row: Sequence, lanes: int) -> None:
        """Quantize a float32 buffer of one row into row `row`; it is rotated in place before."""
        codec, groups = self.codec, self.pages.groups
        if codec.has_hadamard:
            parts = k_parts(self.pages.spec)
            transform(numbers, (), parts, lanes, is_scaled=self.factors is None)
        # The last elements are stored by the vector.
        inverse = T.alloc_buffer((len(groups) + lanes,), F32)
        for first in range(0, len(groups), lanes):
            batch = groups[first : first + lanes]
            keys = [_largest(codec, numbers, begin, end, lanes) for begin, end in batch]
            factor = self.factors and self.factors[first : first + lanes]
            given = None if self.static is None else self.static[row[1], row[2]]
            key = reduce_each(keys, lanes, maximum, "uint32")
            scale = _Scale(codec, key, len(batch), factor, given)
            store(inverse, (first,), scale.lanes, scale.inverse)
            unknown = [inverse[first + i] == 0 for i in range(len(batch))]
            _clear_unknown(numbers, batch, unknown, lanes)
            if codec.is_packed:
                factors = [inverse[first + i] for i in range(len(batch))]
                rounded = [
                    _round(codec, numbers, group, factor, lanes)
                    for group, factor in zip(batch, factors, strict=True)
                ]
                sums = (reduce_each(each, lanes, add) for each in zip(*rounded, strict=True))
                scale.fit(*sums)
            scale.store(self.pages, row, first, len(batch))
        self._store(numbers, inverse, row, lanes)

    def _store(self, numbers, inverse, row: Sequence, lanes: int) -> None:
        """Store the codes of a row, of which packed ones are rounded already."""
        codec, pages, can_pack = self.codec, self.pages, self.can_pack

        def scaled(column, n: int):
            if codec.is_packed:
                return temp(load(numbers, (column,), n), n)
            factor = broadcast(inverse[pages.group_of(column)], n)
            value = temp(load(numbers, (column,), n) * factor, n)
            if self.static is None:
                return value
            lowest, highest = (constant(sign * codec.limit, n) for sign in (-1, 1))
            return temp(T.min(T.max(value, lowest), highest), n)

        width = pages.spec.qk_head_dim
        columns = codec.columns_apart(width)  # whose codes are stored together
        at_once = max(1, packing.MASK_LANES // lanes) if codec.has_high_bits else 1
        for begin, end in ((0, width // len(columns)),) if codec.is_packed else pages.groups:
            with (
                packing.scope() if can_pack else nullcontext(),
                packing.mask_scope() if codec.has_high_bits else nullcontext(),
            ):
                for start, parts in steps(end - begin, lanes, VECTORS_AT_ONCE):
                    for run in _runs(parts, lanes, can_pack, at_once):
                        column = begin + start + run[0].start
                        values = [
                            [scaled(begin + start + n + c.start, c.lanes) for c in run]
                            for n in columns
                        ]
                        if can_pack and len(run) > 1:
                            store_packed_codes(pages, row, column, values)
                        else:
                            store_codes(pages, row, column, run[0].lanes, values)

    def dequantize(self, row: Sequence, sink, sink_row: Sequence, lanes: int) -> None:
        """Write the numbers that row `row` stands for, rounded to the type of `sink`."""
        pages, width = self.pages, self.pages.spec.qk_head_dim
        has_hadamard = self.codec.has_hadamard
        target, at = (T.alloc_buffer((width,), F32), ()) if has_hadamard else (sink, sink_row)
        for begin, end in pages.groups:
            for start, n in chunks(end - begin, lanes):
                column = begin + start
                store(target, (*at, column), n, load_values(pages, row, column, n))
        if has_hadamard:
            transform(target, at, k_parts(pages.spec), lanes)
            for start, n in chunks(width, lanes):
                store(sink, (*sink_row, start), n, load(target, (start,), n))


def _factors(pages: QuantizedPages) -> list[float] | None:
    """Return the factor that the scale of each group takes in; None: they take none.

    A Hadamard matrix of 1 and -1 needs a factor to be orthogonal. Values of float16 are small
    enough that their sums are finite without it, so scales can take it in.
    """
    spec = pages.spec
    if not pages.codec.has_hadamard or spec.dtype != "float16":
        return None
    parts = k_parts(spec)
    return [
        block_factor(end - begin)
        for first, _ in pages.groups
        for begin, end in parts
        if begin <= first < end
    ]


def _clear_unknown(numbers, groups: Sequence, is_unknown: Sequence, lanes: int) -> None:
    """Set the values of groups without a scale to zero: some may be NaN, or infinite.

    This is rare: a branch costs less than a mask for each vector.
    """
    with T.If(functools.reduce(T.Or, is_unknown)), T.Then():
        for (begin, end), condition in zip(groups, is_unknown, strict=True):
            with T.If(condition), T.Then():
                for start, n in chunks(end - begin, lanes):
                    store(numbers, (begin + start,), n, constant(0.0, n))


def _round(codec: Codec, numbers, group: tuple[int, int], factor, lanes: int) -> tuple:
    """Replace the values of a group with their codes, as numbers.

    Returns
    -------
    Vectors whose sums are those of ``code * value * factor``, and of ``code**2``.
    """
    (begin, end), zero = group, constant(0.0, lanes)
    products, squares = (Register(lanes, init=zero) for _ in range(2))
    factor = temp(factor)

    for start, parts in steps(end - begin, lanes, VECTORS_AT_ONCE):
        for c in parts:
            at = (begin + start + c.start,)
            value = temp(load(numbers, at, c.lanes) * broadcast(factor, c.lanes), c.lanes)
            code = T.min(rint(value, c.lanes), constant(float(codec.highest), c.lanes))
            code = temp(code, c.lanes)
            store(numbers, at, c.lanes, code)
            products.fma(code, value)
            squares.fma(code, code)
    return products.get(), squares.get()


def _runs(parts: list[Chunk], lanes: int, can_pack: bool, at_once: int) -> Iterator[list[Chunk]]:
    """Yield as many whole vectors as are packed at once, and the others `at_once` by `at_once`."""
    size = packing.VECTORS
    whole = sum(c.lanes == lanes for c in parts) // size * size if can_pack else 0
    for first in range(0, whole, size):
        yield parts[first : first + size]
    for first in range(whole, len(parts), at_once):
        yield parts[first : first + at_once]


def _largest(codec: Codec, numbers, begin: int, end: int, lanes: int):
    """A vector of keys, the largest of which is that of the value of the largest magnitude."""
    largest = Register(lanes, "uint32", broadcast(T.uint32(0), lanes))

    for start, parts in steps(end - begin, lanes, VECTORS_AT_ONCE):
        for c in parts:
            value, n = load(numbers, (begin + start + c.start,), c.lanes), c.lanes
            key = _key(codec, value, n)
            if n == 1:
                key, n = broadcast(key, lanes), lanes
            while n < lanes:
                key, n = temp(shuffle([key, key], range(2 * n)), 2 * n, "uint32"), 2 * n
            largest.set(T.max(largest.get(), key))
    return largest.get()


def _key(codec: Codec, value, lanes: int):
    """The bits of a magnitude; where a scale has a sign, shifted left, and the sign behind them."""
    bits = temp(T.reinterpret(vector_type("uint32", lanes), value), lanes, "uint32")
    if codec.limit > 0:
        key = T.bitwise_and(bits, broadcast(T.uint32(0x7FFFFFFF), lanes))
    else:
        one, last = (broadcast(T.uint32(n), lanes) for n in (1, 31))
        key = T.bitwise_or(T.shift_left(bits, one), T.shift_right(bits, last))
    return temp(key, lanes, "uint32")


class _Scale:
    """The scales of groups, a lane each, from the keys of their largest values.

    Attributes
    ----------
    bits : uint32 vector
        Scales, 0 or NaN where there is none.
    inverse : float32 vector
        What values are multiplied with to be rounded; 0 where there is no scale.

    Parameters
    ----------
    codec : Codec
    key : uint32 vector
    num_groups : int
    factors : sequence of float, optional
        What the values of each group have to be multiplied with first.
    given : float32 expression, optional
        The scale of all groups that are finite.
    """

    def __init__(
        self, codec: Codec, key, num_groups: int, factors: Sequence | None = None, given=None
    ):
        self.lanes = lanes = next_power_of_two(num_groups)
        self.has_words = codec.scale_dtype == "bfloat16"
        key = temp(key, lanes, "uint32")
        wide, number = (vector_type(dtype, lanes) for dtype in ("uint32", F32))

        def integer(value: int):
            return broadcast(T.uint32(value), lanes)

        is_finite, extreme = key < integer(_INFINITE >> int(codec.limit > 0)), key
        if codec.limit < 0:
            extreme = T.bitwise_or(T.shift_right(key, integer(1)), T.shift_left(key, integer(31)))
        extreme = T.reinterpret(number, extreme)
        if factors:
            factors = temp(literal([*factors, *[1.0] * (lanes - num_groups)]), lanes)
            extreme = extreme * factors
        if given is None:
            scale = extreme / constant(codec.limit, lanes)
        else:
            scale = broadcast(given, lanes)
        bits = self._rounded(scale)
        scale = T.reinterpret(number, bits)
        magnitude = T.bitwise_and(bits, integer(0x7FFFFFFF))
        is_known = T.And(is_finite, magnitude >= integer(_SMALLEST_NORMAL))
        quiet = T.Select(is_finite, integer(0), integer(0x7FC00000))
        self.bits = temp(T.Select(is_known, bits, quiet), lanes, "uint32")
        one, zero = (constant(x, lanes) for x in (1.0, 0.0))
        inverse = (factors if factors is not None else one) / T.Select(is_known, scale, one)
        self.inverse = temp(T.Select(is_known, inverse, zero), lanes)

    def fit(self, products, squares) -> None:
        """Replace the scales by those that fit the codes best; `inverse` stays."""
        lanes, number = self.lanes, vector_type(F32, self.lanes)
        ratio = temp(products / squares, lanes)
        fitted = self._rounded(T.reinterpret(number, self.bits) * ratio)
        magnitude = T.bitwise_and(fitted, broadcast(T.uint32(0x7FFFFFFF), lanes))
        is_normal = magnitude >= broadcast(T.uint32(_SMALLEST_NORMAL), lanes)
        is_known = T.And(self.inverse != constant(0.0, lanes), is_normal)
        self.bits = temp(T.Select(is_known, fitted, self.bits), lanes, "uint32")

    def _rounded(self, scale):
        """The bits of scales rounded to the codec's type, as float32 numbers: uint32."""
        lanes = self.lanes

        def integer(value: int):
            return broadcast(T.uint32(value), lanes)

        wide = vector_type("uint32", lanes)
        bits = temp(T.reinterpret(wide, temp(scale, lanes)), lanes, "uint32")
        if self.has_words:
            odd = T.bitwise_and(T.shift_right(bits, integer(16)), integer(1))
            bits = T.bitwise_and(bits + integer(0x7FFF) + odd, integer(0xFFFF0000))
            bits = temp(bits, lanes, "uint32")
        return bits

    def store(self, pages: QuantizedPages, row: Sequence, first: int, num_groups: int) -> None:
        """Store the scales of the groups of a row from `first` on."""
        bits, dtype = self.bits, F32
        if self.has_words:
            bits, dtype = T.shift_right(bits, broadcast(T.uint32(16), self.lanes)), "uint16"
            bits = T.cast(bits, vector_type(dtype, self.lanes))
        else:
            bits = T.reinterpret(vector_type(F32, self.lanes), bits)
        if num_groups == self.lanes:
            vectors.store(pages.scales, (*row, first), self.lanes, bits)
            return
        bits = temp(bits, self.lanes, dtype)
        for group in range(num_groups):
            T.buffer_store(pages.scales, shuffle([bits], [group]), [*row, first + group])
