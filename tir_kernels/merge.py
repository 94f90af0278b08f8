# SPDX-License-Identifier: Apache-2.0
"""Two attention states over disjoint positions become one."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

from tvm.script import tirx as T

from .cpu import moves, simd
from .cpu.row_numbers import RowNumbers
from .spec import ITEMSIZE, KernelSpec

# log2(x) is the sum of these times t, t^3, t^5, ... with t = (x - 1) / (x + 1). On [1, 2] t is
# at most 1/3 and the error 2e-7.
_LOG2 = tuple(2.8853900817779268 / n for n in (1, 3, 5, 7, 9, 11))


def merge(spec: KernelSpec):
    """Build the kernel that merges a second state into the first.

    Arguments: o ``[T, H, D]``, lse float32 ``[T, H]`` (base 2), o_other, lse_other. A part with an
    lse of -inf counts for nothing, whatever its o holds; two of them give ``o = 0`` and -inf.
    """
    num_heads, head_dim = spec.num_qo_heads, spec.v_head_dim
    row_bytes = num_heads * (3 * head_dim * ITEMSIZE[spec.dtype] + 12)

    def body(o_handle, lse_handle, o_other_handle, lse_other_handle) -> None:
        num_rows = T.int64()
        states = [
            (
                moves.match(o, (num_rows, num_heads, head_dim), spec.dtype),
                moves.match(lse, (num_rows, num_heads), simd.F32),
            )
            for o, lse in ((o_handle, lse_handle), (o_other_handle, lse_other_handle))
        ]
        (o, lse), (o_other, lse_other) = states

        def merge_row(n) -> None:
            weights = [T.alloc_buffer((num_heads,), simd.F32) for _ in range(2)]
            for h, lanes in simd.chunks(num_heads, spec.target.lanes):
                merged = MergedLse(
                    simd.load(lse, (n, h), lanes), simd.load(lse_other, (n, h), lanes), lanes
                )
                simd.store(lse, (n, h), lanes, merged.lse)
                for buffer, weight in zip(weights, merged.weights, strict=True):
                    simd.store(buffer, (h,), lanes, weight)
            with T.serial(num_heads) as h:
                blend((o, o_other), (n, h), [simd.temp(weight[h]) for weight in weights], numbers)

        numbers = RowNumbers(spec.target, [o, o_other])
        with numbers.scope():
            moves.for_each(num_rows, row_bytes, merge_row)

    @T.prim_func(s_tir=True, private=True)
    def kernel(o: T.handle, lse: T.handle, o_other: T.handle, lse_other: T.handle):
        T.func_attr({"tirx.is_scheduled": True, "tirx.noalias": True})
        body(o, lse, o_other, lse_other)

    return kernel


class MergedLse:
    """The lse of two parts together, and the weight of each: vectors of float32."""

    def __init__(self, a, b, lanes: int):
        a, b = simd.temp(a, lanes), simd.temp(b, lanes)
        zero, lowest = simd.constant(0.0, lanes), simd.constant(-3.0e38, lanes)
        top = simd.temp(T.max(a, b), lanes)
        base = simd.temp(T.max(top, lowest), lanes)  # finite, so that -inf - base is no NaN
        parts = [
            simd.temp(T.Select(x < lowest, zero, simd.exp2(x - base, lanes)), lanes) for x in (a, b)
        ]
        total = simd.temp(parts[0] + parts[1], lanes)
        empty = top < lowest
        inverse = simd.temp(
            simd.constant(1.0, lanes) / T.max(total, simd.constant(0.5, lanes)), lanes
        )
        self.weights = [simd.temp(part * inverse, lanes) for part in parts]
        self.lse = simd.temp(T.Select(empty, top, base + _log2(total, lanes)), lanes)


def _log2(x, lanes: int):
    """Base-2 logarithm of values in [1, 2]."""
    one = simd.constant(1.0, lanes)
    t = simd.temp((x - one) / (x + one), lanes)
    square = simd.temp(t * t, lanes)
    value = simd.constant(_LOG2[-1], lanes)
    for c in reversed(_LOG2[:-1]):
        value = value * square + simd.constant(c, lanes)
    return value * t


def blend(parts: Sequence, row: Sequence, weights: Sequence, numbers: RowNumbers) -> None:
    """Sum rows of buffers times their weights into the first, in place.

    A part of weight zero counts for nothing, whatever it holds. That costs a selection a vector,
    more than converting and adding do, so rows without such a part have their own code.
    """

    def emit(scale: Callable) -> None:
        for dim, count in numbers.chunks(int(parts[0].shape[-1])):
            index, total = (*row, dim), None
            lanes = min(count, numbers.lanes)
            for part, weight in zip(parts, weights, strict=True):
                vectors = numbers.load(part, index, count)
                if total is None:
                    total = [scale(x, weight, lanes) for x in vectors]
                else:
                    total = [
                        t + scale(x, weight, lanes) for t, x in zip(total, vectors, strict=True)
                    ]
            numbers.store(parts[0], index, count, total)

    with T.If(functools.reduce(T.And, [weight > T.float32(0) for weight in weights])):
        with T.Then():
            emit(lambda x, weight, lanes: x * simd.broadcast(weight, lanes))
        with T.Else():
            emit(selected)


def selected(value, weight, lanes: int):
    """``value * weight``, and zero where the weight is zero, whatever the value is."""
    weight, zero = simd.broadcast(weight, lanes), simd.constant(0.0, lanes)
    return simd.temp(T.Select(weight == zero, zero, value * weight), lanes)


def weighted(o, index, weight, lanes: int):
    """``o * weight``, and zero where the weight is zero, whatever o holds."""
    return selected(simd.temp(simd.load(o, index, lanes), lanes), weight, lanes)
