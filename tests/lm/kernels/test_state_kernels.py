# SPDX-License-Identifier: Apache-2.0
"""The kernels around recurrences, against NumPy."""

from __future__ import annotations

import numpy as np
import tvm

from tvm_pagedkv.compiler import resolve_target, vector_target
from tvm_pagedkv.config import RecurrentConfig
from tvm_pagedkv_lm.kernels.rows.channel_decay import kimi_inputs


def test_decays_of_channels_to_float32_rounding():
    """Thousands of tokens multiply the error of a decay, so small and large steps must be exact."""
    seed = 2
    print(f"seed {seed}")
    rng, target = np.random.default_rng(seed), resolve_target()
    spec = RecurrentConfig("kda", num_heads=3, num_key_heads=3, key_dim=24, value_dim=24)
    n, width = 4, spec.num_heads * spec.key_dim
    mixed = rng.standard_normal((n, 3 * width)).astype("float32")
    b = rng.standard_normal((n, spec.num_heads)).astype("float32")
    steps = np.linspace(-80, 80, n * width).reshape(n, width).astype("float32")
    bias = rng.standard_normal(width).astype("float32")
    a_log = rng.uniform(0, 3, spec.num_heads).astype("float32")
    kernel = kimi_inputs(spec, "float32", vector_target(target))
    kernel = kernel.with_attr("global_symbol", "kernel")
    built = tvm.tirx.build(tvm.IRModule({"kernel": kernel}), target=target)["kernel"]
    heads = (n, spec.num_heads, spec.key_dim)
    shapes = (heads, heads, heads, heads, heads[:2])
    outs = [tvm.runtime.tensor(np.full(shape, np.nan, "float32")) for shape in shapes]
    built(*(tvm.runtime.tensor(x) for x in (mixed, b, steps, a_log, bias)), *outs)
    q, k, v, log_decay, beta = (each.numpy() for each in outs)
    parts = [x.reshape(heads) for x in np.split(mixed.astype("float64"), 3, axis=1)]
    for found, part in ((q, parts[0]), (k, parts[1])):
        length = np.sqrt((part**2).sum(-1, keepdims=True) + 1e-6)
        np.testing.assert_allclose(found, part / length, rtol=1e-6)
    np.testing.assert_array_equal(v, parts[2])
    np.testing.assert_allclose(beta, 1 / (1 + np.exp(-b.astype("float64"))), rtol=1e-6)
    softplus = np.logaddexp(0, (steps + bias).astype("float64")).reshape(heads)
    expected = -np.exp(a_log.astype("float64"))[:, None] * softplus
    # The argument of an exponential of -80 has a rounding error of 5e-6.
    tolerance = 4e-7 + 1.5e-7 * np.abs(steps + bias).reshape(heads)
    assert (np.abs(log_decay - expected) <= tolerance * np.abs(expected)).all()


if __name__ == "__main__":
    import tvm.testing

    tvm.testing.main()
