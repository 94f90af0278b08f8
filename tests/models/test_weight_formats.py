# SPDX-License-Identifier: Apache-2.0
"""Rounding of weights to codes, and codes of GGUF files, against NumPy and the package gguf."""

from __future__ import annotations

import numpy as np
import pytest

from tvm_pagedkv.models.weight_formats import (
    FORMATS,
    GROUP,
    INT4,
    INT4_MINIMA,
    INT8,
    QuantizedRows,
    quantize,
)

parametrize_format = pytest.mark.parametrize("format", FORMATS.values(), ids=FORMATS)


def _random(seed: int, rows: int = 9, groups: int = 5) -> np.ndarray:
    rng = np.random.default_rng(seed)
    spread = np.exp(rng.normal(size=(rows, groups, 1)) * 3)
    return (rng.normal(size=(rows, groups, GROUP)) * spread).reshape(rows, -1).astype("float32")


@parametrize_format
def test_an_error_is_at_most_half_a_step(format):
    """A step is a scale; scales and minima are rounded to float16 before codes are chosen."""
    weight = _random(0)
    weight[0, :GROUP] = 0
    weight[1, :GROUP] = np.float32(0.37)
    found = quantize(weight, format)
    assert found.codes.max() <= format.max_code
    step = np.abs(found.scales.astype("float64"))
    # The largest numbers may lie beyond the last code: INT4 has none for the largest magnitude of
    # the other sign, and a rounded scale moves the last one by 2**-11 of itself.
    beyond = step * (1 if format == INT4 else format.max_code * 2**-11)
    error = np.abs(found.values().astype("float64") - weight).reshape(*step.shape, GROUP)
    assert (error.max(-1) <= step / 2 + beyond + np.abs(weight).max() * 2**-20).all()
    assert (error[0, 0] == 0).all()


@parametrize_format
def test_numbers_that_a_format_has_stay(format):
    """What was quantized once is found again: codes that reach both ends of a group."""
    rng = np.random.default_rng(1)
    lowest = 1 if format == INT8 else 0
    codes = rng.integers(lowest, format.max_code + 1, (7, 3, GROUP), dtype="uint8")
    codes[..., 0], codes[..., 1] = lowest, format.max_code
    scales = rng.uniform(0.5, 2, (7, 3)).astype("float16")
    minima = rng.uniform(-9, -1, (7, 3)).astype("float16") if format.has_minima else None
    matrix = QuantizedRows(format, codes.reshape(7, -1), scales, minima)
    error = np.abs(quantize(matrix.values(), format).values() - matrix.values())
    # The distance of the ends, which gives the scale, is rounded to float32 with minima.
    assert error.max() <= (2e-2 if format.has_minima else 0)


@pytest.mark.parametrize("format", [INT8, INT4_MINIMA], ids=lambda f: f.name)
def test_other_formats_have_the_numbers_of_int4(format):
    matrix = quantize(_random(2), INT4)
    np.testing.assert_array_equal(matrix.converted(format).values(), matrix.values())


def test_other_conversions_round():
    matrix = quantize(_random(3), INT4_MINIMA)
    found = matrix.converted(INT8)
    np.testing.assert_array_equal(found.values(), quantize(matrix.values(), INT8).values())


@parametrize_format
@pytest.mark.parametrize("number", [np.nan, np.inf, 1e30])
def test_numbers_beyond_a_scale_are_refused(format, number):
    weight = _random(4)
    weight[3, 40] = number
    with pytest.raises(ValueError, match="not finite or too large for a float16 scale"):
        quantize(weight, format)


@pytest.mark.parametrize("name", ["Q8_0", "Q4_0", "Q4_1"])
def test_codes_of_gguf_files_are_kept(name):
    """Bit for bit the numbers that the package of the ggml project reads."""
    gguf = pytest.importorskip("gguf")
    from tvm_pagedkv.models.gguf.quantized import KEPT_TYPES, split_blocks

    kind = gguf.GGMLQuantizationType[name]
    rows = gguf.quants.quantize(_random(5), kind)
    found = split_blocks(rows, KEPT_TYPES[name]).values()
    np.testing.assert_array_equal(found, gguf.quants.dequantize(rows, kind))


if __name__ == "__main__":
    import tvm.testing

    tvm.testing.main()
