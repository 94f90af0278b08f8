# SPDX-License-Identifier: Apache-2.0
"""Two partial states over disjoint positions become one."""

from tvm.script import tirx as T

from .. import vectors
from ..backend import backend_of
from ..define import F32, aligned, attributes
from ..script import prim_func
from ..semantics.partial_states import MergedLse
from ..spec import ITEMSIZE, KernelSpec


def merge(spec: KernelSpec):
    """Build the kernel that merges a second partial state into the first.

    Arguments: o ``[T, H, D]``, lse float32 ``[T, H]`` (base 2), o_other, lse_other. A state with an
    lse of -inf counts for nothing, whatever its o holds; two of them give ``o = 0`` and -inf. An
    lse that is NaN or +inf makes the row's o and lse NaN.
    """
    num_heads, head_dim = spec.num_qo_heads, spec.v_head_dim
    rows = aligned(spec, spec.dtype)

    @prim_func
    def merge(var_o: T.handle, var_lse: T.handle, var_o_other: T.handle, var_lse_other: T.handle):
        T.func_attr(attributes(spec))
        n = T.int64()
        o = T.match_buffer(var_o, (n, num_heads, head_dim), elem_offset=T.int64(), **rows)
        lse = T.match_buffer(var_lse, (n, num_heads), elem_offset=T.int64(), **F32)
        o_other = T.match_buffer(
            var_o_other, (n, num_heads, head_dim), elem_offset=T.int64(), **rows
        )
        lse_other = T.match_buffer(var_lse_other, (n, num_heads), elem_offset=T.int64(), **F32)
        _merge_rows(spec, n, (o, o_other), (lse, lse_other))

    return merge


def _merge_rows(spec: KernelSpec, num_rows, o: tuple, lse: tuple) -> None:
    """Merge states row by row: first the weights of all heads, then O times these."""
    backend, num_heads = backend_of(spec), spec.num_qo_heads

    def merge_row(n, worker, known) -> None:
        weights = worker.table(2, num_heads)

        def weigh(h, lanes):
            both = (vectors.load(x, (n, h), lanes) for x in lse)
            merged = MergedLse(*both, lanes, worker.arithmetic)
            vectors.store(lse[0], (n, h), lanes, merged.lse)
            for i, weight in enumerate(merged.weights):
                vectors.store(weights, (i, h), lanes, weight)

        worker.for_elements(num_heads, weigh)
        worker.sync()
        worker.blend_rows(
            num_heads,
            [lambda h, x=x: (x, (n, h)) for x in o],
            lambda h: [worker.arithmetic.temp(weights[i, h]) for i in range(2)],
        )

    row_bytes = num_heads * (3 * spec.v_head_dim * ITEMSIZE[spec.dtype] + 12)
    backend.for_items(spec, num_rows, lambda known: row_bytes, merge_row, computed=o)
