# SPDX-License-Identifier: Apache-2.0
"""The CPU kernel that makes the arguments of a delta rule with a decay for each channel."""

from tvm.script import tirx as T

from tir_kernels.script import prim_func
from tir_kernels.semantics.decay import exp
from tir_kernels.spec import VectorTarget
from tir_kernels.targets import row_worker
from tvm_pagedkv.config import RecurrentConfig

from ..define import attributes, built_once, match_float32, matcher
from .state_kernels import Widths, rate, split_keys_and_values

_SERIES_TERMS = 8  # of log1p, whose rest is below 2e-9


@built_once
def kimi_inputs(spec: RecurrentConfig, dtype: str, target: VectorTarget):
    """Build the kernel that makes the arguments of the delta rule of Kimi Linear.

    Q and K get a norm of 1 in every head, ``beta = sigmoid(b)`` and
    ``log_decay = -exp(a_log) * softplus(decays + dt_bias)`` in every channel.

    Arguments of the kernel: mixed [n, 2 * num_key_heads * key_dim + num_heads * value_dim] (Q, K
    and V), b float32 [n, num_heads], decays float32 [n, num_heads * key_dim], a_log float32
    [num_heads], dt_bias float32 [num_heads * key_dim], then q and k [n, num_key_heads, key_dim], v
    [n, num_heads, value_dim], log_decay float32 [n, num_heads, key_dim], beta float32
    [n, num_heads].
    """
    widths, match_rows = Widths(spec), matcher(target, dtype)
    num_heads, num_key_heads, key_dim = spec.num_heads, spec.num_key_heads, spec.key_dim
    channels = num_heads * key_dim

    @prim_func
    def kimi_inputs(
        var_mixed: T.handle,
        var_b: T.handle,
        var_decays: T.handle,
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
        b = match_float32(var_b, n, num_heads)
        decays = match_float32(var_decays, n, channels)
        a_log = match_float32(var_a_log, num_heads)
        dt_bias = match_float32(var_dt_bias, channels)
        q = match_rows(var_q, n, num_key_heads, key_dim)
        k = match_rows(var_k, n, num_key_heads, key_dim)
        v = match_rows(var_v, n, num_heads, spec.value_dim)
        log_decay = match_float32(var_log_decay, n, num_heads, key_dim)
        beta = match_float32(var_beta, n, num_heads)
        worker = row_worker(target)
        keys = worker.vectors(key_dim)
        for row in worker.items(n, widths.mixed + channels):
            split_keys_and_values(worker, widths, mixed, row, q, k, v)
            for head in range(T.int64(num_heads)):
                beta[row, head] = rate(b[row, head])
                factor = T.float32(0.0) - T.exp(a_log[head])
                for column in keys.columns():
                    channel = T.meta_var(head * key_dim + column)
                    value = keys.load(decays, (row, channel)) + keys.load(dt_bias, (channel,))
                    step = T.meta_var(softplus(value, keys))
                    keys.store(log_decay, (row, head, column), step * keys.filled(factor))

    return kimi_inputs


def softplus(x, v):
    """Return log(1 + exp(x)) of a vector, to float32 rounding.

    With t = exp(-|x|) and s = t / (2 + t) it is ``max(x, 0) + 2 * (s + s**3 / 3 + ...)``.
    """
    zero, two = v.constant(0.0), v.constant(2.0)
    t = exp(v.temp(T.min(x, zero - x)), v.lanes, v.arithmetic)
    s = v.temp(t / (two + t))
    square = v.temp(s * s)
    series = v.constant(1.0 / (2 * _SERIES_TERMS - 1))
    for term in reversed(range(1, _SERIES_TERMS)):
        series = v.temp(series * square + v.constant(1.0 / (2 * term - 1)))
    return v.temp(T.max(x, zero) + two * s * series)
