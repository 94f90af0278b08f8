# SPDX-License-Identifier: Apache-2.0
"""Activations as integers of 16 bits: two bytes for byte dot products, or words.

`GROUP` neighbouring numbers of a row share a scale. An error is at most 1.6e-5 of the largest
of the group.
"""

from collections.abc import Iterator

import numpy as np
from tvm.script import tirx as T

from tir_kernels.cpu.isa.bytes import words
from tir_kernels.cpu.isa.bytes.dots import UnsignedDots
from tir_kernels.cpu.isa.bytes.two_bytes import MOST
from tir_kernels.cpu.isa.simd import (
    F32,
    add,
    broadcast,
    constant,
    fused_multiply_add,
    load,
    maximum,
    reduce_lanes,
    shuffle,
    store,
    temp,
    vector_type,
)
from tir_kernels.define import target_attributes
from tir_kernels.script import prim_func
from tir_kernels.spec import ITEMSIZE

from ...formats.weight_formats import GROUP
from ..define import built_once, match_float32, match_int32, parallel_if

ROW_BYTES = 2 * GROUP  # of a group
BYTE_LANES, WORD_LANES = UnsignedDots.lanes, words.LANES
_PARALLEL_GROUPS = 1 << 10  # below: cheaper than waking the other threads
# Added to a small number, it leaves in the low bits the nearest whole number plus 128: with that,
# the high one of its two bytes is the one that makes the low one signed.
_ROUNDER = 1.5 * 2**23 + 128
_WORD_ROUNDER = 1.5 * 2**23  # without the 128, for words


@built_once
def encode_rows(in_features: int, dtype: str, *, as_words: bool = False):
    """Build the kernel that converts rows for `linear`.

    Arguments of the kernel: x ``[n, in_features]``; codes uint8 ``[n, groups, ROW_BYTES]``, scales
    float32 and sums int32 ``[n, groups]``: the sum of the integers of a group. A group of which
    some numbers are NaN or infinite has the scale NaN.

    Codes of a group are the high bytes of all numbers, then the low bytes. If `as_words`, they are
    words, of which the second and the third one of each four have changed places: so a dword has
    those that `WordProducts` multiplies with a dword of codes.
    """
    num_groups = in_features // GROUP
    encode_group = _encode_words if as_words else _encode_bytes

    @prim_func
    def encode_rows(var_x: T.handle, var_codes: T.handle, var_scales: T.handle, var_sums: T.handle):
        T.func_attr(target_attributes(on_cpu=True))
        n = T.int64()
        x = T.match_buffer(var_x, (n, in_features), dtype, align=ITEMSIZE[dtype])
        codes = T.match_buffer(var_codes, (n, num_groups, ROW_BYTES), "uint8", align=1)
        scales = match_float32(var_scales, n, num_groups)
        sums = match_int32(var_sums, n, num_groups)
        for row in parallel_if(n * num_groups >= _PARALLEL_GROUPS, n):
            for group in range(T.int64(num_groups)):
                encode_group(x, row, group, codes, scales, sums)

    return encode_rows


def _encode_bytes(x, row, group, codes, scales, sums) -> None:
    """Convert the numbers of a group: the high bytes of all numbers, then the low bytes."""
    starts = range(0, GROUP, BYTE_LANES)
    found = _integers(x, row, group, scales, sums, BYTE_LANES, _ROUNDER)
    for at, bits in zip(starts, found, strict=True):
        high = T.shift_right(bits, broadcast(T.uint32(8), BYTE_LANES))
        low = T.bitwise_xor(bits, broadcast(T.uint32(0x80), BYTE_LANES))  # minus the 128
        for first, part in ((0, high), (GROUP, low)):
            value = T.cast(part, f"uint8x{BYTE_LANES}")
            store(codes, (row, group, first + at), BYTE_LANES, value, "uint8")


def _encode_words(x, row, group, codes, scales, sums) -> None:
    """Convert the numbers of a group to words, in the order of `encode_rows`."""
    found = list(_integers(x, row, group, scales, sums, WORD_LANES, _WORD_ROUNDER))
    for at in range(0, len(found), 2):
        fours = [range(first, first + 4) for first in range(0, 2 * WORD_LANES, 4)]
        low, high = (
            shuffle(found[at : at + 2], [four[i] for four in fours for i in pair])
            for pair in ((0, 1), (2, 3))
        )
        low = T.bitwise_and(low, broadcast(T.uint32(0xFFFF), WORD_LANES))
        high = T.shift_left(high, broadcast(T.uint32(16), WORD_LANES))
        num_bytes = 4 * WORD_LANES
        value = T.reinterpret(f"uint8x{num_bytes}", T.bitwise_or(low, high))
        store(codes, (row, group, at // 2 * num_bytes), num_bytes, value, "uint8")


def _integers(x, row, group, scales, sums, lanes: int, rounder: float) -> Iterator:
    """Yield vectors whose low words have the numbers of a group; store its scale and its sum."""
    starts = range(0, GROUP, lanes)
    numbers = [temp(load(x, (row, group * GROUP + at), lanes), lanes) for at in starts]
    scale, inverse = _scale_of(numbers, lanes)
    store(scales, (row, group), 1, scale)
    total = None
    for number in numbers:
        value = fused_multiply_add(
            number, broadcast(inverse, lanes), constant(rounder, lanes), lanes
        )
        bits = temp(T.reinterpret(vector_type("uint32", lanes), value), lanes, "uint32")
        total = bits if total is None else total + bits
        yield bits
    total = reduce_lanes(total, lanes, add, "uint32")
    offset = GROUP * int(np.float32(rounder).view("uint32"))  # what the rounder adds to bits
    total = total - T.uint32(offset % (1 << 32))
    store(sums, (row, group), 1, T.reinterpret("int32", total), "int32")


def _scale_of(numbers: list, lanes: int):
    """The scale of a group and its inverse; NaN and 0 where a number is not finite."""
    bits = None
    for number in numbers:
        mask = broadcast(T.int32(0x7FFFFFFF), lanes)
        magnitude = T.bitwise_and(T.reinterpret(vector_type("int32", lanes), number), mask)
        bits = magnitude if bits is None else T.max(bits, magnitude)
    bits = reduce_lanes(bits, lanes, maximum, "int32")
    is_finite = bits < T.int32(0x7F800000)
    scale = temp(T.reinterpret(F32, bits) * T.float32(1 / MOST))
    is_normal = T.And(is_finite, scale >= T.float32(2.0**-126))
    one, zero = T.float32(1.0), T.float32(0.0)
    inverse = T.Select(is_normal, one / T.Select(is_normal, scale, one), zero)
    nan = T.reinterpret(F32, T.uint32(0x7FC00000))
    return temp(T.Select(is_normal, scale, T.Select(is_finite, zero, nan))), temp(inverse)
