# SPDX-License-Identifier: Apache-2.0
"""Tolerances of results against the reference: one table for all tests.

Attention is compared row by row: a row is the output of one head for one token, and its size is the
root mean square of its values. Over n positions of similar weight that is 1 / sqrt(n), so a fixed
tolerance would let whole pages be left out of long contexts. Rounding errors shrink with the row as
well: each weight of the softmax has a relative error of its own, and these add up like the weights
themselves. An error may have two parts:

- `OUTPUT_ROUNDING` of the value itself: half a unit in the last place, which nothing can avoid.
- `ARITHMETIC` of the row's size. float32: the sums, and a polynomial for exp2 that is good to 3e-6;
  up to 2.3e-5 were measured. float16: some kernels round the softmax weights before they multiply
  V, 1.6e-3. bfloat16: the same, 1.2e-2.

The log-sum-exp does not depend on the type: weights are summed in float32 before they are rounded.
Its base is 2, its error absolute, `LSE` plus some units in the last place of large values; 1e-5 was
measured. To leave out one of n positions of equal weight changes it by 1 / (n ln 2): that is
noticed up to 50000 positions.

Where Q or K are rounded once more inside (`rounds_qk`), because a kernel rotates them or MLA
absorbs a projection, every logit is off by a rounding error of 16 bits: measured are 1.6e-2 of the
log-sum-exp and 2.5e-2 of the row for bfloat16, 1e-3 and 2.2e-3 for float16.
"""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np

try:
    from tvm.testing import assert_allclose
except ImportError:  # on a machine with TVM's runtime alone, where scripts/gpu compares, too
    from numpy.testing import assert_allclose

OUTPUT_ROUNDING = {"float32": 2**-24, "float16": 2**-11, "bfloat16": 2**-8}
ARITHMETIC = {"float32": 5e-5, "float16": 4e-3, "bfloat16": 2.5e-2}
ARITHMETIC_ROUNDED_QK = {"float32": 5e-5, "float16": 5e-3, "bfloat16": 5e-2}
LSE, LSE_ROUNDING = 3e-5, 2**-22
LSE_ROUNDED_QK = {"float32": LSE, "float16": 2.5e-3, "bfloat16": 3.5e-2}
UNDERFLOW = 2**-122  # the exp2 of kernels never gets below 2**-126, and V has values up to 5 or so


def coarsest(*dtypes: Any) -> str:
    """Return the type with the largest rounding errors, by name."""
    return max(map(str, dtypes), key=OUTPUT_ROUNDING.__getitem__)


def errors(
    actual: Any,
    expected: Any,
    dtype: Any,
    *,
    scale: float | None = None,
    rounds_qk: bool = False,
    times: float = 1.0,
) -> np.ndarray:
    """Errors in multiples of the tolerance.

    Parameters
    ----------
    actual, expected : array_like, of the same shape
        Rows are the last axis. NaN and infinities must be in the same places.
    dtype : str or numpy.dtype
        The coarsest type that the computation rounds to.
    scale : float, optional
        The size that errors are relative to, where it is not that of the row.
    rounds_qk : bool
        Whether Q or K are rounded to `dtype` after a rotation or an absorbed projection.
    times : float
        How much larger errors may be; whoever gives it says why.

    Returns
    -------
    float64 array of their shape, infinite where NaN or an infinity is in another place.
    """
    actual, expected = np.asarray(actual, np.float64), np.asarray(expected, np.float64)
    how = {"scale": scale, "rounds_qk": rounds_qk, "times": times}
    return _in_tolerances(actual, expected, _tolerance(expected, dtype, **how))


def assert_close(actual: Any, expected: Any, dtype: Any, what: str = "result", **how: Any) -> None:
    """Raise an AssertionError about `what` if any of the `errors` is above 1."""
    actual, expected = _as_float64(actual, expected, what)
    _assert_within(actual, expected, _tolerance(expected, dtype, **how), what)


def assert_lse_close(
    actual: Any,
    expected: Any,
    dtype: Any = "float32",
    what: str = "lse",
    *,
    rounds_qk: bool = False,
    times: float = 1.0,
) -> None:
    """Compare log-sum-exps of base 2, as `assert_close`; `dtype` matters to `rounds_qk` only."""
    actual, expected = _as_float64(actual, expected, what)
    absolute = LSE_ROUNDED_QK[str(dtype)] if rounds_qk else LSE
    _assert_within(actual, expected, times * absolute + LSE_ROUNDING * _size(expected), what)


def assert_state_close(actual, expected, *dtypes: Any, what: str = "state", **how: Any) -> None:
    """Compare pairs (o, lse) of kernels that round to any of these types."""
    dtype = coarsest(*dtypes)
    assert_lse_close(actual[1], expected[1], dtype, f"lse of {what}", **how)
    assert_close(actual[0], expected[0], dtype, f"o of {what}", **how)


def _as_float64(actual, expected, what: str) -> tuple[np.ndarray, np.ndarray]:
    actual, expected = (np.asarray(x, dtype=np.float64) for x in (actual, expected))
    assert actual.shape == expected.shape, f"{what}: shape {actual.shape} != {expected.shape}"
    return actual, expected


def _size(values: np.ndarray) -> np.ndarray:
    """Return the magnitudes, 0 for values that are not finite."""
    return np.where(np.isfinite(values), np.abs(values), 0)


def _tolerance(
    expected: np.ndarray,
    dtype: Any,
    scale: float | None = None,
    rounds_qk: bool = False,
    times: float = 1.0,
) -> np.ndarray:
    """Return how large the error of each value may be."""
    size = _size(expected)
    count = np.maximum(np.isfinite(expected).sum(-1, keepdims=True), 1)
    row = np.sqrt((size**2).sum(-1, keepdims=True) / count) if scale is None else scale
    arithmetic = (ARITHMETIC_ROUNDED_QK if rounds_qk else ARITHMETIC)[str(dtype)]
    underflow = max(UNDERFLOW, float(ml_dtypes.finfo(np.dtype(dtype)).smallest_subnormal))
    return times * (OUTPUT_ROUNDING[str(dtype)] * size + arithmetic * row) + underflow


def _in_tolerances(actual, expected, tolerance) -> np.ndarray:
    with np.errstate(invalid="ignore"):
        found = np.abs(actual - expected) / tolerance
    same = (actual == expected) | (np.isnan(actual) & np.isnan(expected))
    return np.where(same, 0, np.where(np.isnan(found), np.inf, found))


def _assert_within(actual, expected, tolerance, what: str) -> None:
    try:
        # It takes one tolerance for all values, so each is divided by its own.
        assert_allclose(actual / tolerance, expected / tolerance, rtol=0, atol=1)
    except AssertionError:
        found = _in_tolerances(actual, expected, tolerance)
        where = tuple(map(int, np.unravel_index(found.argmax(), found.shape)))
        raise AssertionError(
            f"{what}: {(found > 1).sum()} of {found.size} values are wrong, most at {where}: "
            f"{actual[where]} instead of {expected[where]}, {found.max():.3g} times the tolerance"
        ) from None
