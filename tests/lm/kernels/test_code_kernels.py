# SPDX-License-Identifier: Apache-2.0
"""Linear layers over quantized weights, their activations and their rows, against NumPy."""

from __future__ import annotations

import functools

import ml_dtypes  # noqa: F401  (registers bfloat16 with NumPy)
import numpy as np
import pytest
import tvm

from tvm_pagedkv.compiler.build import resolve_target, vector_target
from tvm_pagedkv_lm.formats.weight_formats import FORMATS, GROUP, QuantizedRows
from tvm_pagedkv_lm.kernels.linear.code_embedding import code_embedding
from tvm_pagedkv_lm.kernels.linear.code_matrix import CodeMatrix
from tvm_pagedkv_lm.kernels.linear.linear import linear
from tvm_pagedkv_lm.kernels.linear.packed_products import TASK_ROWS
from tvm_pagedkv_lm.kernels.linear.row_codes import ROW_BYTES, encode_rows

from ... import reference
from ...support.cases.kernels.kernel_specs import needs_cpu
from ...support.cases.models.weight_cases import random_codes

# Rows of a tile and of a task, and what is left of them.
ROWS = (1, 2, 5, 13, TASK_ROWS + 3)
# More groups than a panel has, and a last block with every kind of tail.
SHAPE = (64 + 16 + 3, 5 * GROUP)
TARGETS = {
    "native": "native",
    "avx2": "x86-64-v3",
    "no bytes": "x86-64-v4",
    "numbers": "x86-64-v2",  # multiplies the numbers that codes stand for
}
# Types of activations matter where they are loaded and stored, formats elsewhere.
CASES = [
    pytest.param(name, dtype, cpu, marks=marks if is_short else [*marks, pytest.mark.slow])
    for name in FORMATS
    for dtype, cpu in (
        ("float16", "native"),
        ("bfloat16", "native"),
        ("float32", "avx2"),
        ("float16", "no bytes"),
        ("float32", "numbers"),
    )
    for marks in [[] if cpu == "native" else [needs_cpu(TARGETS[cpu])]]
    for is_short in [
        (dtype, cpu) == ("float16", "native")
        or (name, cpu) == ("int8", "avx2")
        or (name, cpu) == ("int4_minima", "numbers")
    ]
]


@functools.cache
def _compiled(function, cpu, *args, **options):
    kernel = function(*args, **dict(options)).with_attr("global_symbol", "kernel")
    return tvm.tirx.build(tvm.IRModule({"kernel": kernel}), target=resolve_target(cpu))["kernel"]


def _random(rng, shape, dtype: str) -> np.ndarray:
    return rng.standard_normal(shape, dtype=np.float32).astype(dtype)


def _encoded(x: np.ndarray, cpu: str = "native") -> list[np.ndarray]:
    n, groups = len(x), x.shape[1] // GROUP
    outs = [
        tvm.runtime.tensor(np.full(shape, fill, dtype))
        for shape, fill, dtype in (
            ((n, groups, ROW_BYTES), 85, "uint8"),
            ((n, groups), np.nan, "float32"),
            ((n, groups), 1 << 30, "int32"),
        )
    ]
    encode = _compiled(encode_rows, cpu, x.shape[1], str(x.dtype), as_words=_takes_words(cpu))
    encode(tvm.runtime.tensor(x), *outs)
    return [out.numpy() for out in outs]


def _takes_words(cpu: str) -> bool:
    return vector_target(cpu).has_word_dot


@pytest.mark.parametrize("name, dtype, cpu", CASES)
def test_linear(name, dtype, cpu):
    """Products agree with those of the numbers that the codes stand for."""
    rng = np.random.default_rng(7)
    cpu, format = TARGETS[cpu], FORMATS[name]
    matrix = CodeMatrix(*SHAPE, format, vector_target(cpu))
    weight = random_codes(rng, SHAPE, format)
    packed = tvm.runtime.tensor(matrix.pack(weight))
    bias = _random(rng, SHAPE[:1], dtype)
    full = _compiled(linear, cpu, matrix, dtype, dtype, bias=True, residual=True)
    plain = _compiled(linear, cpu, matrix, dtype, "float32")
    for n in ROWS:
        x, residual = _random(rng, (n, SHAPE[1]), dtype), _random(rng, (n, SHAPE[0]), dtype)
        product = x.astype("float64") @ weight.values().astype("float64").T
        rows = _encoded(x, cpu) if matrix.multiplies_codes else [x]
        rows = [tvm.runtime.tensor(array) for array in rows]
        added = [tvm.runtime.tensor(array) for array in (bias, residual)]
        out = tvm.runtime.tensor(np.full((n, SHAPE[0]), np.nan, dtype))
        full(*rows, packed, *added, out)
        expected = product + bias.astype("float64") + residual.astype("float64")
        scale = np.sqrt(SHAPE[1])
        # Activations of 16 bits are no more exact than float16 numbers.
        kind = "float16" if matrix.multiplies_codes and dtype == "float32" else dtype
        reference.assert_close(out.numpy(), expected, kind, f"{n} rows", scale=scale)
        out = tvm.runtime.tensor(np.full((n, SHAPE[0]), np.nan, "float32"))
        plain(*rows, packed, out)
        # Of activations in 16 bits: errors of up to 1.6e-5 of 3 or so, at random.
        error = 1.5e-4 if matrix.multiplies_codes else 2e-6
        np.testing.assert_allclose(out.numpy(), product, rtol=1e-5, atol=error * scale)


@pytest.mark.parametrize(
    "cpu", [TARGETS["native"], pytest.param("x86-64-v3", marks=needs_cpu("x86-64-v3"))]
)
@pytest.mark.parametrize("name", [name for name in FORMATS if name != "mxfp4"])  # never
def test_embedding(name, cpu):
    rng = np.random.default_rng(8)
    matrix = CodeMatrix(*SHAPE, FORMATS[name], vector_target(cpu))
    weight = random_codes(rng, SHAPE, FORMATS[name])
    packed, kernel = tvm.runtime.tensor(matrix.pack(weight)), code_embedding(matrix, "float32")
    function = tvm.IRModule({"kernel": kernel.with_attr("global_symbol", "kernel")})
    built = tvm.tirx.build(function, target=resolve_target(cpu))["kernel"]
    for n in (17, 200):
        ids = rng.integers(0, SHAPE[0], n).astype("int32")
        out = tvm.runtime.tensor(np.full((n, SHAPE[1]), np.nan, "float32"))
        built(tvm.runtime.tensor(ids), packed, out)
        np.testing.assert_array_equal(out.numpy(), weight.values()[ids])


needs_bytes = pytest.mark.skipif(
    not vector_target().has_vnni, reason="this CPU has no byte dot products"
)
ENCODINGS = [
    pytest.param("native", marks=needs_bytes, id="bytes"),
    pytest.param("x86-64-v3", marks=needs_cpu("x86-64-v3"), id="words"),
]


def _numbers(codes: np.ndarray, cpu: str) -> np.ndarray:
    """The integers ``[n, groups, GROUP]`` that codes ``[n, groups, ROW_BYTES]`` stand for."""
    if _takes_words(cpu):
        fours = codes.view("int16").reshape(*codes.shape[:2], GROUP // 4, 4)
        return fours[..., [0, 2, 1, 3]].reshape(*codes.shape[:2], GROUP).astype("int64")
    high, low = (codes[..., part].astype("int8").astype("int64") for part in np.s_[:GROUP, GROUP:])
    return high * 256 + low


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("cpu", ENCODINGS)
def test_activations(cpu, dtype):
    """Codes and scales give the numbers back: within 1.6e-5 of the largest of their group."""
    x = _random(np.random.default_rng(9), (300, 4 * GROUP), dtype)
    x *= np.exp(np.linspace(-9, 9, 300)).astype(dtype)[:, None]
    x[3, GROUP : 2 * GROUP] = 0
    codes, scales, sums = _encoded(x, cpu)
    numbers = _numbers(codes, cpu)
    np.testing.assert_array_equal(sums, numbers.sum(-1))
    groups = x.astype("float64").reshape(300, 4, GROUP)
    error = np.abs(numbers * scales[..., None].astype("float64") - groups)
    assert (error <= np.abs(groups).max(-1, keepdims=True) * 1.6e-5).all()


@pytest.mark.parametrize("number", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("cpu", ENCODINGS)
def test_activations_that_are_not_finite_stay_so(cpu, number):
    x = np.ones((2, 2 * GROUP), "float16")
    x[1, GROUP + 5] = number
    _, scales, _ = _encoded(x, cpu)
    np.testing.assert_array_equal(np.isnan(scales), [[False, False], [False, True]])


@pytest.mark.parametrize("cpu", ENCODINGS)
@pytest.mark.parametrize(
    "name",
    [
        x if x in ("int8", "int4_minima") else pytest.param(x, marks=pytest.mark.slow)
        for x in FORMATS
    ],
)
def test_largest_codes_and_activations_do_not_overflow(name, cpu):
    """Sums of products fit 32 bits where every code and every activation is the largest one."""
    format = FORMATS[name]
    matrix = CodeMatrix(16, 2 * GROUP, format, vector_target(cpu))
    codes = np.full((16, 2 * GROUP), format.max_code, "uint8")
    codes[8:] = 7 if format.is_mxfp4 else 0
    scales = np.ones((16, 2), "float16")
    if format.is_mxfp4:
        scales = np.full((16, 2), 127, "uint8")
    weight = QuantizedRows(format, codes, scales, scales if format.has_minima else None)
    kernel = _compiled(linear, cpu, matrix, "float32", "float32")
    for n in (1, 2, 7):
        x = np.ones((n, 2 * GROUP), "float32")
        x[n // 2] = -1
        out = tvm.runtime.tensor(np.full((n, 16), np.nan, "float32"))
        rows = [tvm.runtime.tensor(array) for array in _encoded(x, cpu)]
        kernel(*rows, tvm.runtime.tensor(matrix.pack(weight)), out)
        np.testing.assert_allclose(out.numpy(), x @ weight.values().T, rtol=1e-4)


if __name__ == "__main__":
    import tvm.testing

    tvm.testing.main()
