# SPDX-License-Identifier: Apache-2.0
"""The specification of index lanes: the scores of positions, and which are chosen."""

from __future__ import annotations

import numpy as np

from ..support.tolerances import assert_close


def index_scores(q, weights, keys, scale) -> np.ndarray:
    """Scores of ``keys [S, D]`` for a row ``q [H, D]`` with ``weights [H]``."""
    products = scale * np.einsum("hd,sd->hs", *(np.asarray(x, np.float64) for x in (q, keys)))
    return np.asarray(weights, np.float64) @ np.maximum(products, 0)


def assert_chosen(positions, scores, dtype: str) -> None:
    """Check a row of positions by the scores of all that it sees, up to rounding."""
    positions = np.asarray(positions)
    count = min(len(positions), len(scores))
    chosen = positions[:count]
    assert (positions[count:] == -1).all() and (np.diff(chosen) > 0).all()
    assert chosen[0] >= 0 and chosen[-1] < len(scores)
    best = np.sort(scores)[::-1][:count]
    assert_close(np.sort(scores[chosen])[::-1], best, dtype, "scores of the chosen")
