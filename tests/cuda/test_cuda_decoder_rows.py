# SPDX-License-Identifier: Apache-2.0
"""Norms and gates of a decoder for GPUs, on the emulator: their source is that for CPUs."""

from __future__ import annotations

import math

import ml_dtypes  # noqa: F401  (registers bfloat16 with NumPy)
import numpy as np
import pytest
import tvm

from tir_kernels.spec import CudaTarget
from tvm_pagedkv.compiler.cuda.source import cuda_source
from tvm_pagedkv_lm.kernels.rows import gates, norms

from ..support.cases.kernels.cuda_cases import BF16, F16, F32
from ..support.emulators.cuda_emulator import emulated
from ..support.harness.selections import latin_square

GPU, EPSILON = CudaTarget(), 1e-5
# Relative to the largest of a row: of float32 sums, and of one rounding.
TOLERANCE = {F32: 1e-5, F16: 2**-10, BF16: 2**-8}


def _run(kernel, *inputs: np.ndarray, out: tuple[int, ...]) -> np.ndarray:
    function = emulated(cuda_source({"kernel": kernel})).get_function("kernel")
    result = tvm.runtime.tensor(np.full(out, np.nan, inputs[0].dtype))
    function(*(tvm.runtime.tensor(each) for each in inputs), result)
    return result.numpy().astype("float64")


def _random(rng, shape, dtype: str) -> np.ndarray:
    return (rng.standard_normal(shape) * 3).astype(dtype)


def _assert_close(found: np.ndarray, expected: np.ndarray, dtype: str) -> None:
    error = np.abs(found - expected).max(-1) / np.abs(expected).max(-1)
    assert error.max() < TOLERANCE[dtype]


def _norm(x: np.ndarray, weight) -> np.ndarray:
    x = x.astype("float64")
    return x / np.sqrt((x**2).mean(-1, keepdims=True) + EPSILON) * weight


@latin_square(3, "features", "dtype")
@pytest.mark.parametrize("dtype", [F32, F16, BF16])
@pytest.mark.parametrize("features", [300, 128, 7])
@pytest.mark.parametrize("subtracts_mean", [False, True], ids=["rms", "layer"])
def test_norm_with_a_residual_and_a_scale(features, dtype, subtracts_mean):
    rng = np.random.default_rng(0)
    x, residual = (_random(rng, (5, features), dtype) for _ in range(2))
    weight, scale = _random(rng, (features,), F32), np.array([0.5], F32)
    kernel = norms.norm(
        features, EPSILON, dtype, GPU, residual=True, scaled=True, subtracts_mean=subtracts_mean
    )
    centered = x.astype("float64")
    if subtracts_mean:
        centered -= centered.mean(-1, keepdims=True)
    expected = (_norm(centered, weight) + residual.astype("float64")) * scale
    _assert_close(_run(kernel, x, weight, residual, scale, out=x.shape), expected, dtype)


@pytest.mark.parametrize("v", ["as_is", "unit"])
def test_norms_of_q_k_and_v(v):
    rng, (num_q, num_k, dim) = np.random.default_rng(1), (3, 2, 40)
    x = _random(rng, (4, num_q + 2 * num_k, dim), BF16)
    q_weight, k_weight = (_random(rng, (dim,), F32) for _ in range(2))
    kernel = norms.qk_norm((num_q, dim), (num_k, dim), num_k * dim, EPSILON, BF16, GPU, v=v)
    flat = x.reshape(4, -1)
    found = _run(kernel, flat, q_weight, k_weight, out=flat.shape).reshape(x.shape)
    q, k, values = np.split(x, (num_q, num_q + num_k), axis=1)
    _assert_close(found[:, :num_q], _norm(q, q_weight), BF16)
    _assert_close(found[:, num_q : num_q + num_k], _norm(k, k_weight), BF16)
    expected = values.astype("float64") if v == "as_is" else _norm(values, 1.0)
    _assert_close(found[:, num_q + num_k :], expected, BF16)


@pytest.mark.parametrize("activation", ["silu", "gelu_tanh"])
def test_gates(activation):
    """Covers the range of the gate in which the activation goes from 0 to the identity."""
    gate = np.concatenate([np.linspace(-12, 12, 497), [-80.0, 80.0, 0.0]]).astype(F32)
    g = gate.astype("float64")
    tanh = np.tanh(math.sqrt(2 / math.pi) * (g + 0.044715 * g**3))
    expected = g / (1 + np.exp(-g)) if activation == "silu" else 0.5 * g * (1 + tanh)
    x = np.concatenate([gate, np.ones_like(gate)])[None]
    found = _run(gates.gated(activation, len(gate), F32, GPU), x, out=(1, len(gate)))[0]
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)


def test_a_gate_that_is_cut_off():
    """Only what exceeds the mean and a standard deviation of a row opens the gate."""
    x = _random(np.random.default_rng(2), (3, 2 * 200), F32)
    gate, up = np.split(x.astype("float64"), 2, axis=1)
    cutoff = gate.mean(-1, keepdims=True) + gate.std(-1, keepdims=True)
    found = _run(gates.gated("identity", 200, F32, GPU, deviations=1.0), x, out=(3, 200))
    _assert_close(found, np.maximum(gate - cutoff, 0) * up, F32)


if __name__ == "__main__":
    import tvm.testing

    tvm.testing.main()
