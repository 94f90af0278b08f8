# SPDX-License-Identifier: Apache-2.0
"""The specification of index lanes: the scores of positions, and which are chosen."""

from __future__ import annotations

import numpy as np

from ..support.harness.tolerances import assert_close


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


def block_scores(q, keys, block_size: int) -> np.ndarray:
    """Scores ``[H, blocks]`` of the blocks of ``keys [S, D]`` for a row ``q [H, D]``."""
    products = np.einsum("hd,sd->hs", *(np.asarray(x, np.float64) for x in (q, keys)))
    starts = range(0, len(keys), block_size)
    return np.stack([products[:, at : at + block_size].max(axis=1) for at in starts], axis=1)


def assert_chosen_blocks(blocks, scores, kept: tuple[int, int], dtype: str) -> None:
    """Check the blocks that the heads of a row have chosen, by the scores of all that it sees.

    `kept` has how many of the first and of the last ones are always chosen.
    """
    init, local = kept
    number = np.arange(scores.shape[1])
    is_kept = (number < init) | (number >= len(number) - local)
    for chosen, of_head in zip(np.asarray(blocks), scores, strict=True):
        count = min(len(chosen), len(of_head))
        assert (chosen[count:] == -1).all() and (np.diff(chosen[:count]) > 0).all()
        assert chosen[0] >= 0 and chosen[count - 1] < len(of_head)
        has_chosen = np.isin(number, chosen)
        assert has_chosen[is_kept].all()
        rest = np.sort(of_head[has_chosen & ~is_kept])[::-1]
        best = np.sort(of_head[~is_kept])[::-1][: len(rest)]
        assert_close(rest, best, dtype, "scores of the chosen")
