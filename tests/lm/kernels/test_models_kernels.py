# SPDX-License-Identifier: Apache-2.0
"""The kernels of decoders that treat each row by itself, against NumPy."""

from __future__ import annotations

import math

import ml_dtypes  # noqa: F401  (registers bfloat16 with NumPy)
import numpy as np
import pytest
import tvm

from tvm_pagedkv.compiler.build import resolve_target, vector_target
from tvm_pagedkv_lm.kernels.rows import gates, norms, row_kernels

TARGET = resolve_target()
VECTOR = vector_target(TARGET)
EPSILON = 1e-5
# Relative to the largest of a row: of float32 sums, and of one rounding to bfloat16.
TOLERANCE = {"float32": 1e-5, "bfloat16": 2**-8}


def _run(kernel, *inputs: np.ndarray, out: tuple[tuple[int, ...], str]) -> np.ndarray:
    kernel = kernel.with_attr("global_symbol", "kernel")
    built = tvm.tirx.build(tvm.IRModule({"kernel": kernel}), target=TARGET)["kernel"]
    shape, dtype = out
    result = tvm.runtime.tensor(np.full(shape, np.nan, dtype))
    built(*(tvm.runtime.tensor(each) for each in inputs), result)
    return result.numpy().astype("float64")


def _random(rng, shape, dtype: str) -> np.ndarray:
    return (rng.standard_normal(shape) * 3).astype(dtype)


def _assert_close(found: np.ndarray, expected: np.ndarray, dtype: str) -> None:
    error = np.abs(found - expected).max(-1) / np.abs(expected).max(-1)
    assert error.max() < TOLERANCE[dtype]


def _norm(x: np.ndarray, weight: np.ndarray) -> np.ndarray:
    x = x.astype("float64")
    return x / np.sqrt((x**2).mean(-1, keepdims=True) + EPSILON) * weight


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("features", [48, 50, 7])
@pytest.mark.parametrize("subtracts_mean", [False, True], ids=["rms", "layer"])
def test_norm_with_a_residual(features, dtype, subtracts_mean):
    rng = np.random.default_rng(0)
    x, residual = (_random(rng, (5, features), dtype) for _ in range(2))
    weight = _random(rng, (features,), "float32")
    kernel = norms.norm(
        features, EPSILON, dtype, VECTOR, residual=True, subtracts_mean=subtracts_mean
    )
    found = _run(kernel, x, weight, residual, out=(x.shape, dtype))
    centered = x.astype("float64")
    if subtracts_mean:
        centered -= centered.mean(-1, keepdims=True)
    _assert_close(found, _norm(centered, weight) + residual.astype("float64"), dtype)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(("num_q", "num_k", "dim"), [(4, 2, 16), (3, 1, 24), (1, 1, 40)])
@pytest.mark.parametrize("per_head", [True, False], ids=["heads", "projection"])
def test_norms_of_q_and_k(num_q, num_k, dim, per_head, dtype):
    rng = np.random.default_rng(1)
    q, k = ((num_q, dim), (num_k, dim)) if per_head else ((1, num_q * dim), (1, num_k * dim))
    x = _random(rng, (5, (num_q + 2 * num_k) * dim), dtype)
    weights = [_random(rng, (width,), "float32") for _, width in (q, k)]
    kernel = norms.qk_norm(q, k, num_k * dim, EPSILON, dtype, VECTOR)
    found = _run(kernel, x, *weights, out=(x.shape, dtype))
    ends = num_q * dim, (num_q + num_k) * dim
    for part, what, weight in zip(np.split(x, ends, -1)[:2], (q, k), weights, strict=True):
        columns, found_part = part.reshape(5, *what), found[:, : part.shape[1]].reshape(5, *what)
        _assert_close(found_part, _norm(columns, weight), dtype)
        found = found[:, part.shape[1] :]
    np.testing.assert_array_equal(found, x[:, ends[1] :].astype("float64"))


def test_gates():
    """Covers the range of the gate in which the activation goes from 0 to the identity."""
    gate = np.concatenate([np.linspace(-12, 12, 999), [-80.0, 80.0, 0.0]]).astype("float32")
    x = np.stack([np.concatenate([gate, np.ones_like(gate)])])
    g = gate.astype("float64")
    tanh = np.tanh(math.sqrt(2 / math.pi) * (g + 0.044715 * g**3))
    expected = {"silu": g / (1 + np.exp(-g)), "gelu_tanh": 0.5 * g * (1 + tanh)}
    for activation, values in expected.items():
        kernel = gates.gated(activation, len(gate), "float32", VECTOR)
        found = _run(kernel, x, out=((1, len(gate)), "float32"))[0]
        np.testing.assert_allclose(found, values, rtol=1e-5, atol=1e-6, err_msg=activation)


def test_soft_cap():
    logits = np.concatenate([np.linspace(-90, 90, 997), [1e9, -1e9, 1e-4]]).astype("float32")
    kernel = row_kernels.soft_cap_logits(len(logits), 30.0, VECTOR)
    found = _run(kernel, logits[None], out=((1, len(logits)), "float32"))[0]
    np.testing.assert_allclose(found, 30 * np.tanh(logits.astype("float64") / 30), rtol=2e-6)


if __name__ == "__main__":
    import tvm.testing

    tvm.testing.main()
