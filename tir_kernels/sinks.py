# SPDX-License-Identifier: Apache-2.0
"""Learned attention sinks: a logit of each head that takes weight from all positions."""

from __future__ import annotations

from tvm.script import tirx as T

from .cpu import moves, simd
from .cpu.row_numbers import RowNumbers
from .merge import MergedLse, blend
from .spec import ITEMSIZE, LOG2E, KernelSpec


def apply_sinks(spec: KernelSpec):
    """Build the kernel that lets a sink into the softmax of every row, after attention, in place.

    A sink joins the denominator alone, so it is a second state whose lse is the sink and whose o is
    zero. Arguments: o ``[T, H, D]``, lse float32 ``[T, H]`` (base 2), sinks float32 ``[H]``
    (natural logits; -inf: none). A row that has seen nothing keeps ``o = 0``.
    """
    num_heads, head_dim, most = spec.num_qo_heads, spec.v_head_dim, spec.target.lanes
    row_bytes = num_heads * (2 * head_dim * ITEMSIZE[spec.dtype] + 8)

    def body(o_handle, lse_handle, sinks_handle) -> None:
        num_rows = T.int64()
        o = moves.match(o_handle, (num_rows, num_heads, head_dim), spec.dtype)
        lse = moves.match(lse_handle, (num_rows, num_heads), simd.F32)
        sinks = moves.match(sinks_handle, (num_heads,), simd.F32)

        def weigh_row(n) -> None:
            weights = T.alloc_buffer((num_heads,), simd.F32)
            for h, lanes in simd.chunks(num_heads, most):
                sink = simd.load(sinks, (h,), lanes) * simd.constant(LOG2E, lanes)
                merged = MergedLse(simd.load(lse, (n, h), lanes), sink, lanes)
                simd.store(lse, (n, h), lanes, merged.lse)
                simd.store(weights, (h,), lanes, merged.weights[0])
            with T.serial(num_heads) as h:
                blend([o], (n, h), [simd.temp(weights[h])], numbers)

        numbers = RowNumbers(spec.target, [o])
        with numbers.scope():
            moves.for_each(num_rows, row_bytes, weigh_row)

    @T.prim_func(s_tir=True, private=True)
    def kernel(o: T.handle, lse: T.handle, sinks: T.handle):
        T.func_attr({"tirx.is_scheduled": True, "tirx.noalias": True})
        body(o, lse, sinks)

    return kernel
