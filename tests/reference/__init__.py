# SPDX-License-Identifier: Apache-2.0
"""The specification in plain NumPy: obviously right, slow, and what every test compares with.

Its parts lie in modules of their own, and this one gathers them under one name; those of a single
topic's tests are imported from where they are. Tensors may be of any float type; sums run in
float64. `lse` is base 2, as in the kernels.
"""

from __future__ import annotations

import numpy as np

from ..support.harness.tolerances import (
    assert_close,
    assert_lse_close,
    assert_state_close,
    coarsest,
)
from .batch import mla_paged_attention, paged_attention, ragged_attention
from .cache import ReferenceCache, ReferenceLatentCache
from .dense_attention import (
    alibi_bias,
    alibi_slopes,
    apply_sinks,
    attention,
    causal_mask,
    first_seen,
    merge,
    past_mask,
    span_mask,
)
from .mla import mla_absorb, mla_absorbed, mla_expand
from .pages import (
    append,
    append_at_positions,
    gather_slots,
    sequence_slots,
    table_lengths,
    vector_sparse_offsets,
)
from .rope import Rope, inverse_frequencies, rotate
from .trees import tree_depths, tree_mask, tree_order, tree_path, tree_positions

__all__ = [
    "ReferenceCache",
    "ReferenceLatentCache",
    "Rope",
    "alibi_bias",
    "alibi_slopes",
    "append",
    "append_at_positions",
    "apply_sinks",
    "assert_close",
    "assert_lse_close",
    "assert_same_bits",
    "assert_state_close",
    "attention",
    "causal_mask",
    "coarsest",
    "first_seen",
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
    "span_mask",
    "sequence_slots",
    "table_lengths",
    "tree_depths",
    "tree_mask",
    "tree_order",
    "tree_path",
    "tree_positions",
    "vector_sparse_offsets",
]


def assert_same_bits(actual: np.ndarray, expected: np.ndarray, what: str = "pages") -> None:
    """Compare bit for bit, NaN too."""
    assert actual.shape == expected.shape and actual.dtype == expected.dtype
    as_bytes = [np.ascontiguousarray(x).view(np.uint8) for x in (actual, expected)]
    np.testing.assert_array_equal(*as_bytes, err_msg=what)
