# SPDX-License-Identifier: Apache-2.0
"""Partial states that become one: two of disjoint positions, and one with learned sinks."""

from collections.abc import Callable

from tvm.script import tirx as T

from ..define import attributes
from ..script import inline, prim_func
from ..semantics.softmax import MergedLse
from ..signatures.moves import APPLY_SINKS, MERGE, StateInputs
from ..spec import ITEMSIZE, LOG2E, KernelSpec
from ..targets import components_of
from ..vectors import constant, load, store


@inline
def weigh_heads(worker, weigh: Callable, weights, row, num_heads: int):
    """Call ``weigh(weights, row, head, lanes)`` for vectors of heads, and wait for all of them."""
    for h in worker.elements(num_heads):
        weigh(weights, row, h, worker.lanes)
    if worker.rest(num_heads) > 0:
        weigh(weights, row, num_heads - worker.rest(num_heads), worker.rest(num_heads))
    worker.sync()


def merge(spec: KernelSpec):
    """Build the kernel that merges a second partial state into the first.

    A state with an lse of -inf counts for nothing, whatever its o holds; two of them give ``o = 0``
    and -inf. An lse that is NaN or +inf makes the row's o and lse NaN.
    """
    num_heads, head_dim = spec.num_qo_heads, spec.v_head_dim
    row_bytes = num_heads * (3 * head_dim * ITEMSIZE[spec.dtype] + 12)
    c = components_of(spec)

    @prim_func(arguments=MERGE.of(spec))
    def merge(a: StateInputs):
        T.func_attr(attributes(spec))
        n = T.meta_var(a.o.shape[0])
        worker = c.Worker(spec, (a.o, a.o_other))
        rows = c.RowBlend(worker)

        @inline
        def weigh(weights, row, h, lanes):
            states = T.meta_var([load(x, (row, h), lanes) for x in (a.lse, a.lse_other)])
            merged = T.meta_var(MergedLse(*states, lanes, worker.arithmetic))
            store(a.lse, (row, h), lanes, merged.lse)
            store(weights, (0, h), lanes, merged.weights[0])
            store(weights, (1, h), lanes, merged.weights[1])

        for row in worker.items(n, row_bytes):
            weights = worker.table(2, num_heads)
            weigh_heads(worker, weigh, weights, row, num_heads)
            for h in rows.rows(num_heads):
                own, other = weights[0, h], weights[1, h]
                rows.blend((row, h), (own, other))

    return merge


def apply_sinks(spec: KernelSpec):
    """Build the kernel that lets a sink logit into the softmax of every row, after attention.

    A sink logit joins the denominator alone, so it is a second partial state whose lse is the logit
    and whose o is zero. A row that has seen nothing keeps ``o = 0``. Every row of a head sees its
    sink: one that is NaN or +inf makes them NaN.
    """
    num_heads, head_dim = spec.num_qo_heads, spec.v_head_dim
    row_bytes = num_heads * (2 * head_dim * ITEMSIZE[spec.dtype] + 8)
    c = components_of(spec)

    @prim_func(arguments=APPLY_SINKS.of(spec))
    def apply_sinks(a: StateInputs):
        T.func_attr(attributes(spec))
        n = T.meta_var(a.o.shape[0])
        worker = c.Worker(spec, (a.o,))
        rows = c.RowBlend(worker)

        @inline
        def weigh(weights, row, h, lanes):
            sink = T.meta_var(load(a.sink_logits, (h,), lanes) * constant(LOG2E, lanes))
            merged = T.meta_var(
                MergedLse(load(a.lse, (row, h), lanes), sink, lanes, worker.arithmetic)
            )
            store(a.lse, (row, h), lanes, merged.lse)
            store(weights, (0, h), lanes, merged.weights[0])

        for row in worker.items(n, row_bytes):
            weights = worker.table(1, num_heads)
            weigh_heads(worker, weigh, weights, row, num_heads)
            for h in rows.rows(num_heads):
                weight = weights[0, h]
                rows.blend((row, h), (weight,))

    return apply_sinks
