# SPDX-License-Identifier: Apache-2.0
"""Learned attention sinks: a logit of each head that takes weight from all positions."""

from tvm.script import tirx as T

from .. import vectors
from ..backend import backend_of
from ..define import F32, aligned, attributes
from ..script import prim_func
from ..semantics.partial_states import MergedLse
from ..spec import ITEMSIZE, LOG2E, KernelSpec


def apply_sinks(spec: KernelSpec):
    """Build the kernel that lets a sink logit into the softmax of every row, after attention.

    A sink logit joins the denominator alone, so it is a second partial state whose lse is the logit
    and whose o is zero. Arguments: o ``[T, H, D]`` and lse float32 ``[T, H]`` (base 2), changed in
    place; sink_logits float32 ``[H]`` (natural logits; -inf: none). A row that has seen nothing
    keeps ``o = 0``. Every row of a head sees its sink: one that is NaN or +inf makes them NaN.
    """
    num_heads, head_dim = spec.num_qo_heads, spec.v_head_dim
    rows = aligned(spec, spec.dtype)

    @prim_func
    def apply_sinks(var_o: T.handle, var_lse: T.handle, var_sinks: T.handle):
        T.func_attr(attributes(spec))
        n = T.int64()
        o = T.match_buffer(var_o, (n, num_heads, head_dim), elem_offset=T.int64(), **rows)
        lse = T.match_buffer(var_lse, (n, num_heads), elem_offset=T.int64(), **F32)
        sinks = T.match_buffer(var_sinks, (num_heads,), elem_offset=T.int64(), **F32)
        _weigh_rows(spec, n, o, lse, sinks)

    return apply_sinks


def _weigh_rows(spec: KernelSpec, num_rows, o, lse, sinks) -> None:
    """Scale every row by its weight, and add the sink to its lse."""
    backend, num_heads = backend_of(spec), spec.num_qo_heads

    def weigh_row(n, worker, known) -> None:
        weights = worker.table(1, num_heads)

        def weigh(h, lanes):
            sink = vectors.load(sinks, (h,), lanes) * vectors.constant(LOG2E, lanes)
            own = vectors.load(lse, (n, h), lanes)
            merged = MergedLse(own, sink, lanes, worker.arithmetic)
            vectors.store(lse, (n, h), lanes, merged.lse)
            vectors.store(weights, (0, h), lanes, merged.weights[0])

        worker.for_elements(num_heads, weigh)
        worker.sync()
        worker.blend_rows(
            num_heads,
            [lambda h: (o, (n, h))],
            lambda h: [worker.arithmetic.temp(weights[0, h])],
        )

    row_bytes = num_heads * (2 * spec.v_head_dim * ITEMSIZE[spec.dtype] + 8)
    backend.for_items(spec, num_rows, lambda known: row_bytes, weigh_row, computed=[o])
