# SPDX-License-Identifier: Apache-2.0
"""The specification in plain NumPy: obviously right, slow, and what every test compares with.

Its parts lie in modules of their own, and this one gathers them under one name; those of a single
topic's tests are imported from where they are. Tensors may be of any float type; sums run in
float64. `lse` is base 2, as in the kernels.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from .reference_attention import (
    alibi_bias,
    alibi_slopes,
    apply_sinks,
    attention,
    causal_mask,
    merge,
    past_mask,
)
from .reference_batch import mla_paged_attention, paged_attention, ragged_attention
from .reference_cache import ReferenceCache, ReferenceLatentCache
from .reference_mla import mla_absorb, mla_absorbed, mla_expand
from .reference_pages import (
    append,
    append_at_positions,
    gather_slots,
    sequence_slots,
    table_lengths,
    vector_sparse_offsets,
)
from .reference_rope import Rope, inverse_frequencies, rotate
from .reference_trees import tree_depths, tree_mask, tree_order, tree_path, tree_positions

__all__ = [
    "ReferenceCache",
    "ReferenceLatentCache",
    "Rope",
    "TOLERANCES",
    "alibi_bias",
    "alibi_slopes",
    "append",
    "append_at_positions",
    "apply_sinks",
    "assert_close",
    "assert_same_bits",
    "attention",
    "causal_mask",
    "gather_slots",
    "inverse_frequencies",
    "merge",
    "mla_absorb",
    "mla_absorbed",
    "mla_expand",
    "mla_paged_attention",
    "paged_attention",
    "past_mask",
    "ragged_attention",
    "rotate",
    "sequence_slots",
    "table_lengths",
    "tree_depths",
    "tree_mask",
    "tree_order",
    "tree_path",
    "tree_positions",
    "vector_sparse_offsets",
]

# Largest acceptable error, relative to the largest magnitude that is compared (at least 1).
# float32: sums over a few thousand terms and the kernels' polynomial exp2 (3e-6).
# float16, bfloat16: one rounding of the result, and of P before it multiplies V.
TOLERANCES = {"float32": 2e-5, "float16": 2e-3, "bfloat16": 1.6e-2}


def assert_close(actual: Any, expected: Any, dtype: str, what: str = "result") -> None:
    """Compare with the table of tolerances; infinities must match exactly, NaN never does."""
    actual = np.asarray(actual, dtype=np.float64)
    expected = np.asarray(expected, dtype=np.float64)
    assert actual.shape == expected.shape, f"{what}: shape {actual.shape} != {expected.shape}"
    if actual.size == 0:
        return
    infinite = np.isinf(expected)
    np.testing.assert_array_equal(actual[infinite], expected[infinite], err_msg=what)
    finite_actual, finite_expected = actual[~infinite], expected[~infinite]
    assert np.isfinite(finite_actual).all(), f"{what}: {np.isnan(actual).sum()} NaN"
    if finite_expected.size == 0:
        return
    scale = max(1.0, np.abs(finite_expected).max())
    error = np.abs(finite_actual - finite_expected).max() / scale
    assert error <= TOLERANCES[dtype], f"{what}: error {error:.2e} > {TOLERANCES[dtype]:.0e}"


def assert_same_bits(actual: np.ndarray, expected: np.ndarray, what: str = "pages") -> None:
    """Compare bit for bit, NaN too."""
    assert actual.shape == expected.shape and actual.dtype == expected.dtype
    as_bytes = [np.ascontiguousarray(x).view(np.uint8) for x in (actual, expected)]
    np.testing.assert_array_equal(*as_bytes, err_msg=what)
