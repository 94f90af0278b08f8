# SPDX-License-Identifier: Apache-2.0
"""The comparison that all others rest on."""

from __future__ import annotations

import ml_dtypes  # noqa: F401  (registers bfloat16 with NumPy)
import numpy as np
import pytest

from .. import reference
from ..support.harness import tolerances

DTYPES = list(tolerances.ARITHMETIC)


def attended(num_positions: int, left_out: slice | None, seed: int = 0):
    """o and lse of a few heads over random positions, some of which are left out."""
    rng = np.random.default_rng(seed)
    q, k = rng.standard_normal((1, 4, 64)), rng.standard_normal((num_positions, 4, 64))
    v, mask = rng.standard_normal(k.shape), np.ones((1, num_positions), bool)
    if left_out is not None:
        mask[:, left_out] = False
    return reference.attention(q, k, v, mask, 1 / 8)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("left_out", [slice(600, 632), slice(600, 616), slice(600, 608)])
def test_left_out_positions_show_in_the_output_alone(dtype, left_out):
    o, wrong = (attended(1700, some)[0].astype(dtype) for some in (None, left_out))
    exact = attended(1700, None)[0]
    reference.assert_close(o, exact, dtype)
    with pytest.raises(AssertionError, match="times the tolerance"):
        reference.assert_close(wrong, exact, dtype)


def test_one_left_out_position_shows_in_the_lse():
    exact, wrong = (attended(30_000, some)[1] for some in (None, slice(700, 701)))
    reference.assert_lse_close(exact.astype("float32"), exact)
    with pytest.raises(AssertionError, match="lse"):
        reference.assert_lse_close(wrong, exact)


@pytest.mark.parametrize("dtype", DTYPES)
def test_values_of_any_size_may_be_rounded(dtype):
    for exponent in (-40, -12, 0, 12) if dtype == "float16" else (-140, -40, 0, 40, 120):
        exact = np.random.default_rng(0).standard_normal((500, 8)) * 2.0**exponent
        reference.assert_close(exact.astype(dtype), exact, dtype)


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_what_is_not_finite_has_its_place(value):
    finite = np.ones((3, 4))
    other = finite.copy()
    other[1, 2] = value
    for compare in (
        lambda *pair: reference.assert_close(*pair, "bfloat16"),
        reference.assert_lse_close,
    ):
        compare(other, other)
        elsewhere = np.roll(other, 1, axis=0)
        for pair in ((other, finite), (finite, other), (elsewhere, other)):
            with pytest.raises(AssertionError):
                compare(*pair)


def test_a_small_row_is_not_measured_by_a_large_one():
    exact = np.stack([np.full(8, 100.0), np.full(8, 0.01)])
    wrong = exact + 1e-3
    with pytest.raises(AssertionError, match=r"most at \(1, "):
        reference.assert_close(wrong, exact, "bfloat16")


def test_rows_of_zeros_are_exact():
    with pytest.raises(AssertionError):
        reference.assert_close(np.full((1, 4), 1e-30), np.zeros((1, 4)), "float32")


def test_shapes_must_be_the_same():
    with pytest.raises(AssertionError, match=r"shape \(2, 3\) != \(3,\)"):
        reference.assert_close(np.ones((2, 3)), np.ones(3), "float32")


if __name__ == "__main__":
    import tvm.testing

    tvm.testing.main()
