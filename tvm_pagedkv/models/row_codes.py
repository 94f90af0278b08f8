# SPDX-License-Identifier: Apache-2.0
"""Activations as integers of 16 bits in two bytes, for byte dot products.

`GROUP` neighbouring numbers of a row share a scale. An error is at most 1.6e-5 of the largest
of the group.
"""

from tvm.script import tirx as T

from tir_kernels.cpu.simd import (
    F32,
    add,
    broadcast,
    constant,
    fused_multiply_add,
    load,
    maximum,
    reduce_lanes,
    store,
    temp,
)
from tir_kernels.cpu.two_bytes import MOST
from tir_kernels.cpu.vnni import UnsignedDots
from tir_kernels.define import target_attributes
from tir_kernels.script import inline, prim_func
from tir_kernels.spec import ITEMSIZE

from .emit import built_once
from .weight_formats import GROUP

LANES = UnsignedDots.lanes
ROW_BYTES = 2 * GROUP  # of a group: the high bytes of all numbers, then the low bytes
_PARALLEL_GROUPS = 1 << 10  # below: cheaper than waking the other threads
# Added to a small number, it leaves in the low bits the nearest whole number plus 128: with that,
# the high one of its two bytes is the one that makes the low one signed.
_ROUNDER = 1.5 * 2**23 + 128
_OFFSET = 0x4B400000 + 128  # the bits of _ROUNDER


@built_once
def encode_rows(in_features: int, dtype: str):
    """Build the kernel that converts rows for `code_linear`.

    Arguments of the kernel: x ``[n, in_features]``; codes uint8 ``[n, groups, ROW_BYTES]``, scales
    float32 and sums int32 ``[n, groups]``: the sum of the integers of a group. A group of which
    some numbers are NaN or infinite has the scale NaN.
    """
    num_groups = in_features // GROUP

    @prim_func
    def encode_rows(var_x: T.handle, var_codes: T.handle, var_scales: T.handle, var_sums: T.handle):
        T.func_attr(target_attributes(on_cpu=True))
        n = T.int64()
        x = T.match_buffer(var_x, (n, in_features), dtype, align=ITEMSIZE[dtype])
        codes = T.match_buffer(var_codes, (n, num_groups, ROW_BYTES), "uint8", align=1)
        scales = T.match_buffer(var_scales, (n, num_groups), F32, align=4)
        sums = T.match_buffer(var_sums, (n, num_groups), "int32", align=4)
        with T.sblock("root"):
            T.reads()
            T.writes()
            if n * num_groups >= _PARALLEL_GROUPS:
                for row in T.parallel(n):
                    _encode_row(x, row, codes, scales, sums)
            else:
                for row in range(n):
                    _encode_row(x, row, codes, scales, sums)

    return encode_rows


@inline
def _encode_row(x, row, codes, scales, sums):
    for group in range(T.int64(codes.shape[1])):
        _encode_group(x, row, group, codes, scales, sums)


def _encode_group(x, row, group, codes, scales, sums) -> None:
    """Convert the numbers of a group."""
    starts = range(0, GROUP, LANES)
    numbers = [temp(load(x, (row, group * GROUP + at), LANES), LANES) for at in starts]
    scale, inverse = _scale_of(numbers)
    store(scales, (row, group), 1, scale)
    total = None
    for at, number in zip(starts, numbers, strict=True):
        rounder = constant(_ROUNDER, LANES)
        value = fused_multiply_add(number, broadcast(inverse, LANES), rounder, LANES)
        bits = temp(T.reinterpret("uint32x16", value), LANES, "uint32")
        total = bits if total is None else total + bits
        high = T.shift_right(bits, broadcast(T.uint32(8), LANES))
        low = T.bitwise_xor(bits, broadcast(T.uint32(0x80), LANES))  # minus the 128
        for first, part in ((0, high), (GROUP, low)):
            store(codes, (row, group, first + at), LANES, T.cast(part, "uint8x16"), "uint8")
    total = reduce_lanes(total, LANES, add, "uint32")
    offset = T.uint32(GROUP * _OFFSET % (1 << 32))
    store(sums, (row, group), 1, T.reinterpret("int32", total - offset), "int32")


def _scale_of(numbers):
    """The scale of a group and its inverse; NaN and 0 where a number is not finite."""
    bits = None
    for number in numbers:
        mask = broadcast(T.int32(0x7FFFFFFF), LANES)
        magnitude = T.bitwise_and(T.reinterpret("int32x16", number), mask)
        bits = magnitude if bits is None else T.max(bits, magnitude)
    bits = reduce_lanes(bits, LANES, maximum, "int32")
    is_finite = bits < T.int32(0x7F800000)
    scale = temp(T.reinterpret(F32, bits) * T.float32(1 / MOST))
    is_normal = T.And(is_finite, scale >= T.float32(2.0**-126))
    one, zero = T.float32(1.0), T.float32(0.0)
    inverse = T.Select(is_normal, one / T.Select(is_normal, scale, one), zero)
    nan = T.reinterpret(F32, T.uint32(0x7FC00000))
    return temp(T.Select(is_normal, scale, T.Select(is_finite, zero, nan))), temp(inverse)
