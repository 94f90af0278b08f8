# SPDX-License-Identifier: Apache-2.0
"""Rounding of weights to codes, and codes of GGUF files, against NumPy and the package gguf."""

from __future__ import annotations

import numpy as np
import pytest

from tvm_pagedkv_lm.formats.weight_formats import (
    FORMATS,
    GROUP,
    INT4,
    INT4_MINIMA,
    INT8,
    MXFP4,
    QuantizedRows,
    quantize,
)

ROUNDED = {name: each for name, each in FORMATS.items() if each != MXFP4}
parametrize_format = pytest.mark.parametrize("format", ROUNDED.values(), ids=ROUNDED)


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
    from tvm_pagedkv_lm.gguf.quantized import KEPT_TYPES, split_blocks

    kind = gguf.GGMLQuantizationType[name]
    rows = gguf.quants.quantize(_random(5), kind)
    found = split_blocks(rows, KEPT_TYPES[name]).values()
    np.testing.assert_array_equal(found, gguf.quants.dequantize(rows, kind))


# --- mxfp4 --------------------------------------------------------------------------------------

_MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)  # of the eight codes without a sign


def _mxfp4(seed: int, lowest: int, highest: int) -> tuple[QuantizedRows, np.ndarray]:
    """Random codes and their numbers by the definition of the format, in float64."""
    rng = np.random.default_rng(seed)
    codes = rng.integers(0, 16, (9, 4 * GROUP)).astype("uint8")
    scales = rng.integers(lowest, highest + 1, (9, 4)).astype("uint8")
    signs = np.where(codes & 8, -1.0, 1.0)
    powers = 2.0 ** (np.repeat(scales, GROUP, 1).astype("float64") - 127)
    return QuantizedRows(MXFP4, codes, scales), signs * np.take(_MAGNITUDES, codes & 7) * powers


def test_numbers_of_mxfp4_are_exact():
    """For every scale whose numbers float32 has: the largest are 6 * 2 ** 125."""
    matrix, expected = _mxfp4(6, 0, 252)
    np.testing.assert_array_equal(matrix.values().astype("float64"), expected)


def test_int8_has_the_numbers_of_mxfp4():
    matrix, expected = _mxfp4(7, 104, 142)  # scales that float16 has
    np.testing.assert_array_equal(matrix.converted(INT8).values(), expected)


def test_scales_of_mxfp4_beyond_float16_round():
    matrix, expected = _mxfp4(8, 90, 110)
    found = matrix.converted(INT8).values()
    np.testing.assert_allclose(found, expected, rtol=0, atol=2.0**-24 * 127)


def test_nothing_is_rounded_to_mxfp4():
    with pytest.raises(ValueError, match="weights are not rounded to mxfp4"):
        quantize(_random(9), MXFP4)


def test_blocks_of_mxfp4_as_transformers_reads_them():
    torch = pytest.importorskip("torch")
    integration = pytest.importorskip("transformers.integrations.mxfp4")
    from tvm_pagedkv_lm.formats.mxfp4 import unpack_blocks

    rng = np.random.default_rng(10)
    blocks = rng.integers(0, 256, (6, 4, GROUP // 2)).astype("uint8")
    scales = rng.integers(110, 130, (6, 4)).astype("uint8")
    found = QuantizedRows(MXFP4, unpack_blocks(blocks).reshape(6, -1), scales).values()
    expected = integration.convert_moe_packed_tensors(
        torch.tensor(blocks[None]), torch.tensor(scales[None]), dtype=torch.float32
    )
    np.testing.assert_array_equal(found, expected[0].numpy().T)


if __name__ == "__main__":
    import tvm.testing

    tvm.testing.main()
