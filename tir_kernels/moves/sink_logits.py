# SPDX-License-Identifier: Apache-2.0
"""Learned attention sinks: a logit of each head that takes weight from all positions."""

from __future__ import annotations

from tvm.script import tirx as T

from .. import vectors
from ..backend import backend_of
from ..semantics.partial_states import MergedLse
from ..spec import ITEMSIZE, LOG2E, KernelSpec


def apply_sinks(spec: KernelSpec):
    """Build the kernel that lets a sink into the softmax of every row, after attention, in place.

    A sink joins the denominator alone, so it is a second state whose lse is the sink and whose o is
    zero. Arguments: o ``[T, H, D]``, lse float32 ``[T, H]`` (base 2), sinks float32 ``[H]``
    (natural logits; -inf: none). A row that has seen nothing keeps ``o = 0``. Every row of a head
    sees its sink: one that is NaN or +inf makes them NaN.
    """
    backend = backend_of(spec)
    num_heads, head_dim = spec.num_qo_heads, spec.v_head_dim
    row_bytes = num_heads * (2 * head_dim * ITEMSIZE[spec.dtype] + 8)

    def body(o_handle, lse_handle, sinks_handle) -> None:
        num_rows = T.int64()
        o = backend.match_rows(o_handle, (num_rows, num_heads, head_dim), spec.dtype)
        lse = backend.match(lse_handle, (num_rows, num_heads), vectors.F32)
        sinks = backend.match(sinks_handle, (num_heads,), vectors.F32)

        def weigh_row(n, worker, known) -> None:
            weights = worker.table(1, num_heads)

            def weigh(h, lanes):
                sink = vectors.load(sinks, (h,), lanes) * vectors.constant(LOG2E, lanes)
                merged = MergedLse(vectors.load(lse, (n, h), lanes), sink, lanes, worker.arithmetic)
                vectors.store(lse, (n, h), lanes, merged.lse)
                vectors.store(weights, (0, h), lanes, merged.weights[0])

            worker.for_elements(num_heads, weigh)
            worker.sync()
            worker.blend_rows(
                num_heads,
                [lambda h: (o, (n, h))],
                lambda h: [worker.arithmetic.temp(weights[0, h])],
            )

        backend.for_items(spec, num_rows, lambda known: row_bytes, weigh_row, computed=[o])

    return backend.define_kernel(dict.fromkeys(("o", "lse", "sinks"), T.handle), body)
