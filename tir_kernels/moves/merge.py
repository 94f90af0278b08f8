# SPDX-License-Identifier: Apache-2.0
"""Two attention states over disjoint positions become one."""

from __future__ import annotations

from tvm.script import tirx as T

from .. import vectors
from ..backend import backend_of
from ..semantics.partial_states import MergedLse
from ..spec import ITEMSIZE, KernelSpec


def merge(spec: KernelSpec):
    """Build the kernel that merges a second state into the first.

    Arguments: o ``[T, H, D]``, lse float32 ``[T, H]`` (base 2), o_other, lse_other. A part with an
    lse of -inf counts for nothing, whatever its o holds; two of them give ``o = 0`` and -inf. An
    lse that is NaN or +inf makes the row's o and lse NaN.
    """
    backend = backend_of(spec)
    num_heads, head_dim = spec.num_qo_heads, spec.v_head_dim
    row_bytes = num_heads * (3 * head_dim * ITEMSIZE[spec.dtype] + 12)

    def body(o_handle, lse_handle, o_other_handle, lse_other_handle) -> None:
        num_rows = T.int64()
        states = [
            (
                backend.match_rows(o, (num_rows, num_heads, head_dim), spec.dtype),
                backend.match(lse, (num_rows, num_heads), vectors.F32),
            )
            for o, lse in ((o_handle, lse_handle), (o_other_handle, lse_other_handle))
        ]
        (o, lse), (o_other, lse_other) = states

        def merge_row(n, worker, known) -> None:
            weights = worker.table(2, num_heads)

            def weigh(h, lanes):
                parts = (vectors.load(x, (n, h), lanes) for x in (lse, lse_other))
                merged = MergedLse(*parts, lanes, worker.arithmetic)
                vectors.store(lse, (n, h), lanes, merged.lse)
                for i, weight in enumerate(merged.weights):
                    vectors.store(weights, (i, h), lanes, weight)

            worker.for_elements(num_heads, weigh)
            worker.sync()
            worker.blend_rows(
                num_heads,
                [lambda h: (o, (n, h)), lambda h: (o_other, (n, h))],
                lambda h: [worker.arithmetic.temp(weights[i, h]) for i in range(2)],
            )

        backend.for_items(spec, num_rows, lambda known: row_bytes, merge_row, computed=[o, o_other])

    return backend.define_kernel(
        dict.fromkeys(("o", "lse", "o_other", "lse_other"), T.handle), body
    )
