# SPDX-License-Identifier: Apache-2.0
"""Linear layers over packed weights, and rows looked up in these, against NumPy."""

from __future__ import annotations

import functools

import ml_dtypes  # noqa: F401  (registers bfloat16 with NumPy)
import numpy as np
import pytest
import tvm

from tir_kernels.spec import VectorTarget
from tvm_pagedkv.compiler.build import resolve_target, vector_target
from tvm_pagedkv_lm import DecoderModel
from tvm_pagedkv_lm.kernels.linear.linear import embedding, linear
from tvm_pagedkv_lm.kernels.linear.packed_layout import PackedMatrix
from tvm_pagedkv_lm.kernels.linear.packed_products import DEPTH, TASK_ROWS

from ... import reference
from ...support.cases.kernels.kernel_specs import needs_cpu

# Rows of a tile and of a task, and what is left of them.
ROWS = (1, 2, 5, 6, 7, 13, TASK_ROWS - 1, TASK_ROWS, 2 * TASK_ROWS + 3)
SHAPES = {
    "one": (1, 1),
    "tail": (65, 48),
    "odd": (127, 33),
    "parts": (200, 2 * DEPTH + 6),
    "whole": (128, DEPTH),
}
TARGETS = {"native": "native", "avx2": "x86-64-v3", "no pairs": "x86-64-v4"}
# Every shape with every dtype on this CPU; elsewhere the shape that has every kind of tail.
# Without pairs only bfloat16 has other code than on this CPU.
CASES = [
    pytest.param(shape, dtype, cpu, marks=marks if is_short else [*marks, pytest.mark.slow])
    for shape in SHAPES
    for dtype in ("float32", "float16", "bfloat16")
    for cpu in TARGETS
    for marks in [[] if cpu == "native" else [needs_cpu(TARGETS[cpu])]]
    for is_short in [
        shape == "parts"
        and (cpu in ("native", "avx2") or dtype == "bfloat16")
        or cpu == "native"
        and shape == "odd"
    ]
]


@functools.cache
def _compiled(function, matrix: PackedMatrix, cpu, *args, **options):
    kernel = function(matrix, *args, **dict(options)).with_attr("global_symbol", "kernel")
    return tvm.tirx.build(tvm.IRModule({"kernel": kernel}), target=resolve_target(cpu))["kernel"]


def _random(rng, shape, dtype: str) -> np.ndarray:
    return rng.standard_normal(shape, dtype=np.float32).astype(dtype)


@pytest.mark.parametrize("shape, dtype, cpu", CASES)
def test_linear(shape, dtype, cpu):
    """Linear layers agree with NumPy: with bias and residual, and plain with float32 output."""
    rng = np.random.default_rng(7)
    shape, cpu = SHAPES[shape], TARGETS[cpu]
    matrix = PackedMatrix(*shape, dtype, vector_target(cpu))
    weight = _random(rng, shape, dtype)
    packed = tvm.runtime.tensor(matrix.pack(weight))
    bias = _random(rng, shape[:1], dtype)
    full = _compiled(linear, matrix, cpu, dtype, dtype, bias=True, residual=True)
    plain = _compiled(linear, matrix, cpu, dtype, "float32")
    for n in ROWS:
        x, residual = _random(rng, (n, shape[1]), dtype), _random(rng, (n, shape[0]), dtype)
        product = x.astype("float64") @ weight.astype("float64").T
        inputs = [tvm.runtime.tensor(value) for value in (x, bias, residual)]
        out = tvm.runtime.tensor(np.full((n, shape[0]), np.nan, dtype))
        full(inputs[0], packed, *inputs[1:], out)
        expected = product + bias.astype("float64") + residual.astype("float64")
        # The products that are summed have the size 1, whatever they add up to.
        scale = np.sqrt(shape[1])
        reference.assert_close(out.numpy(), expected, dtype, f"{n} rows", scale=scale)
        out = tvm.runtime.tensor(np.full((n, shape[0]), np.nan, "float32"))
        plain(inputs[0], packed, out)
        # All products are exact in float32.
        np.testing.assert_allclose(out.numpy(), product, rtol=1e-5, atol=2e-6 * scale)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_embedding(shape, dtype):
    rng = np.random.default_rng(8)
    matrix = PackedMatrix(*shape, dtype, vector_target())
    weight = _random(rng, shape, dtype)
    ids = rng.integers(0, shape[0], 17).astype("int32")
    out = tvm.runtime.tensor(np.full((17, shape[1]), np.nan, dtype))
    packed = tvm.runtime.tensor(matrix.pack(weight))
    _compiled(embedding, matrix, "native")(tvm.runtime.tensor(ids), packed, out)
    np.testing.assert_array_equal(out.numpy(), weight[ids])


@pytest.mark.parametrize("function", [linear, embedding])
def test_float16_needs_conversion_in_hardware(function):
    matrix = PackedMatrix(64, 64, "float16", VectorTarget(4, 16, has_f16_convert=False))
    with pytest.raises(ValueError, match="arguments of float16.* has_f16_convert=False"):
        function(matrix, *(["float16"] * 2 if function is linear else []))


def test_models_refuse_float16_without_conversion():
    with pytest.raises(ValueError, match="float16 needs a CPU target that converts"):
        DecoderModel.from_pretrained(dtype="float16", target="x86-64")


if __name__ == "__main__":
    import tvm.testing

    tvm.testing.main()
