# SPDX-License-Identifier: Apache-2.0
"""CPU kernels around a recurrence: its arguments, and the gate and the norm of its output."""

import math

from tvm.script import tirx as T

from tir_kernels.script import inline, prim_func
from tir_kernels.spec import VectorTarget
from tir_kernels.targets import row_worker
from tvm_pagedkv.config import RecurrentConfig

from ..define import attributes, built_once, match_float32, matcher, unused
from .gates import activate

_L2_EPSILON = 1e-6


class Widths:
    """The widths of rows of a recurrence.

    Attributes
    ----------
    key, value : int
        Of a head of Q and K, and of V.
    keys, values, mixed : int
        Of all heads of Q or K, of those of V, and of Q, K and V.
    """

    def __init__(self, spec: RecurrentConfig):
        self.key, self.value = spec.key_dim, spec.value_dim
        self.keys, self.values = spec.num_key_heads * self.key, spec.num_heads * self.value
        self.mixed = 2 * self.keys + self.values


@built_once
def delta_inputs(spec: RecurrentConfig, dtype: str, target: VectorTarget):
    """Build the kernel that makes the arguments of a gated delta rule.

    Q and K get a norm of 1 in every head, ``beta = sigmoid(b)`` and
    ``log_decay = -exp(a_log) * softplus(a + dt_bias)``.

    Arguments of the kernel: mixed [n, 2 * num_key_heads * key_dim + num_heads * value_dim] (Q, K
    and V), gates float32 [n, 2 * num_heads] (b, a), a_log and dt_bias float32 [num_heads], then q
    and k [n, num_key_heads, key_dim], v [n, num_heads, value_dim], log_decay and beta float32
    [n, num_heads].
    """
    widths, match_rows = Widths(spec), matcher(target, dtype)
    num_heads, num_key_heads = spec.num_heads, spec.num_key_heads

    @prim_func
    def delta_inputs(
        var_mixed: T.handle,
        var_gates: T.handle,
        var_a_log: T.handle,
        var_dt_bias: T.handle,
        var_q: T.handle,
        var_k: T.handle,
        var_v: T.handle,
        var_log_decay: T.handle,
        var_beta: T.handle,
    ):
        T.func_attr(attributes(target))
        n = T.int64()
        mixed = match_rows(var_mixed, n, widths.mixed)
        gates = match_float32(var_gates, n, 2 * num_heads)
        a_log = match_float32(var_a_log, num_heads)
        dt_bias = match_float32(var_dt_bias, num_heads)
        q = match_rows(var_q, n, num_key_heads, spec.key_dim)
        k = match_rows(var_k, n, num_key_heads, spec.key_dim)
        v = match_rows(var_v, n, num_heads, spec.value_dim)
        log_decay = match_float32(var_log_decay, n, num_heads)
        beta = match_float32(var_beta, n, num_heads)
        worker = row_worker(target)
        for row in worker.items(n, widths.mixed):
            split_keys_and_values(worker, widths, mixed, row, q, k, v)
            for head in range(T.int64(num_heads)):
                beta[row, head] = rate(gates[row, head])
                step = T.meta_var(softplus(worker, gates[row, head + num_heads] + dt_bias[head]))
                log_decay[row, head] = T.float32(0.0) - T.exp(a_log[head]) * step

    return delta_inputs


@built_once
def mamba2_inputs(
    spec: RecurrentConfig, limit: tuple[float, float], dtype: str, target: VectorTarget
):
    """Build the kernel that makes the arguments of a Mamba2 recurrence.

    With ``step = clamp(softplus(dt + dt_bias), *limit)``: ``v = step * x``, ``k = B``, ``q = C``
    and ``log_decay = -exp(a_log) * step``.

    Arguments of the kernel: mixed [n, num_heads * value_dim + 2 * num_key_heads * key_dim] (x, B
    and C), steps float32 [n, num_heads], a_log and dt_bias float32 [num_heads], then q and k
    [n, num_key_heads, key_dim], v [n, num_heads, value_dim], log_decay float32 [n, num_heads].
    """
    widths, match_rows = Widths(spec), matcher(target, dtype)
    num_heads, num_key_heads, (smallest, largest) = spec.num_heads, spec.num_key_heads, limit

    @prim_func
    def mamba2_inputs(
        var_mixed: T.handle,
        var_steps: T.handle,
        var_a_log: T.handle,
        var_dt_bias: T.handle,
        var_q: T.handle,
        var_k: T.handle,
        var_v: T.handle,
        var_log_decay: T.handle,
    ):
        T.func_attr(attributes(target))
        n = T.int64()
        mixed = match_rows(var_mixed, n, widths.mixed)
        steps = match_float32(var_steps, n, num_heads)
        a_log = match_float32(var_a_log, num_heads)
        dt_bias = match_float32(var_dt_bias, num_heads)
        q = match_rows(var_q, n, num_key_heads, spec.key_dim)
        k = match_rows(var_k, n, num_key_heads, spec.key_dim)
        v = match_rows(var_v, n, num_heads, spec.value_dim)
        log_decay = match_float32(var_log_decay, n, num_heads)
        worker = row_worker(target)
        keys, values = worker.vectors(widths.key), worker.vectors(widths.value)
        for row in worker.items(n, widths.mixed):
            copy_heads(keys, mixed, row, widths.values, k)
            copy_heads(keys, mixed, row, widths.values + widths.keys, q)
            for head in range(T.int64(num_heads)):
                step = softplus(worker, steps[row, head] + dt_bias[head])
                if smallest > 0:
                    step = T.max(step, T.float32(smallest))
                if math.isfinite(largest):
                    step = T.min(step, T.float32(largest))
                log_decay[row, head] = T.float32(0.0) - T.exp(a_log[head]) * step
                for column in values.columns():
                    x = T.meta_var(values.load(mixed, (row, head * widths.value + column)))
                    values.store(v, (row, head, column), x * values.filled(step))

    return mamba2_inputs


@built_once
def gated_norm(
    heads: tuple[int, int],
    num_groups: int,
    norm: str | None,
    epsilon: float,
    dtype: str,
    target: VectorTarget,
    *,
    shares_weight: bool = False,
    skip_width: int = 0,
    activation: str = "silu",
):
    """Build the kernel of the gate and the norm after a recurrence.

    Parameters
    ----------
    heads : (int, int)
        Number of heads and their width.
    num_groups : int
        Number of parts of a row that are normalized by themselves, each of which has whole heads.
    norm : {"gate_first", "gate_last"}, optional
        Whether ``activation(gate)`` multiplies before or after the RMS norm; None: there is none.
    epsilon : float
    shares_weight : bool
        Whether all groups have the same weights.
    skip_width : int
        If not 0, ``d * x`` is added to o first, where x is the beginning of rows of this width.
    activation : {"silu", "sigmoid"}

    Arguments of the kernel: o [n, features], gate [n, features], where chosen x [n, skip_width] and
    d float32 [heads], with a norm its weight float32 [features or those of a group], out
    [n, features].
    """
    num_heads, head_dim = heads
    features, heads_per_group = num_heads * head_dim, num_heads // num_groups
    width, has_skip = features // num_groups, skip_width > 0
    match_rows = matcher(target, dtype)

    @prim_func(absent=unused(x=has_skip, d=has_skip, weight=norm))
    def gated_norm(
        var_o: T.handle,
        var_gate: T.handle,
        var_x: T.handle,
        var_d: T.handle,
        var_weight: T.handle,
        var_out: T.handle,
    ):
        T.func_attr(attributes(target))
        n = T.int64()
        o = match_rows(var_o, n, features)
        gate = match_rows(var_gate, n, features)
        x = match_rows(var_x, n, skip_width)
        d = match_float32(var_d, num_heads)
        weight = match_float32(var_weight, width if shares_weight else features)
        out = match_rows(var_out, n, features)
        worker = row_worker(target)
        v, of_group = worker.vectors(head_dim), worker.vectors(width, head_dim)
        for row in worker.items(n, features):
            values = T.alloc_buffer((width,), "float32")
            for group in range(T.int64(num_groups)):
                squares = v.constant(0.0)
                for head in range(T.int64(heads_per_group)):
                    for j in v.columns():
                        at = T.meta_var(head * head_dim + j)
                        column = T.meta_var(group * width + at)
                        value = v.load(o, (row, column))
                        if has_skip:
                            factor = T.meta_var(v.filled(d[group * heads_per_group + head]))
                            value += v.load(x, (row, column)) * factor
                        if norm != "gate_last":
                            value *= activated(activation, v, gate, (row, column))
                        squares += value * value
                        v.store(values, (at,), value)
                scale = T.float32(1.0)
                if norm is not None:
                    mean_square = T.meta_var(v.sum(squares) / T.float32(width))
                    scale = T.float32(1.0) / T.sqrt(mean_square + T.float32(epsilon))
                for j in of_group.columns():
                    column = T.meta_var(group * width + j)
                    value = of_group.load(values, (j,)) * of_group.filled(scale)
                    if norm is not None:
                        at = T.meta_var(j if shares_weight else column)
                        value *= of_group.load(weight, (at,))
                    if norm == "gate_last":
                        value *= activated(activation, of_group, gate, (row, column))
                    of_group.store(out, (row, column), value)

    return gated_norm


def activated(activation: str, v, gate, at: tuple):
    """Return the activation of columns of a row of the gate."""
    return activate(activation, v.temp(v.load(gate, at)), v)


@inline
def split_keys_and_values(worker, widths, mixed, row, q, k, v):
    """Write Q, K and V of a row to heads; those of Q and K get a norm of 1."""
    keys, values = worker.vectors(widths.key), worker.vectors(widths.value)
    _scale_heads_to_one(keys, mixed, row, 0, q)
    _scale_heads_to_one(keys, mixed, row, widths.keys, k)
    copy_heads(values, mixed, row, 2 * widths.keys, v)


@inline
def _scale_heads_to_one(v, source, row, begin, out):
    """Write columns of a row to heads, divided by the root of the sum of their squares."""
    for head in range(T.int64(out.shape[1])):
        first = T.meta_var(head * v.width + begin)
        squares = v.constant(0.0)
        for column in v.columns():
            value = v.load(source, (row, first + column))
            squares += value * value
        scale = T.float32(1.0) / T.sqrt(v.sum(squares) + T.float32(_L2_EPSILON))
        for column in v.columns():
            value = v.load(source, (row, first + column)) * v.filled(scale)
            v.store(out, (row, head, column), value)


@inline
def copy_heads(v, source, row, begin, out):
    """Copy columns of a row to heads."""
    for head in range(T.int64(out.shape[1])):
        first = T.meta_var(head * v.width + begin)
        for column in v.columns():
            v.store(out, (row, head, column), v.load(source, (row, first + column)))


def rate(b):
    """Return the sigmoid of a number."""
    return T.float32(1.0) / (T.float32(1.0) + T.exp(T.float32(0.0) - b))


def softplus(worker, x):
    """Return log(1 + exp(x)) of a number, without overflow."""
    x, zero = worker.vectors(1).temp(x), T.float32(0.0)
    return T.max(x, zero) + T.log1p(T.exp(T.min(x, zero - x)))
