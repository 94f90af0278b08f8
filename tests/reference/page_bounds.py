# SPDX-License-Identifier: Apache-2.0
"""The specification of bounds of pages, and of the choice of pages by them (Quest)."""

from __future__ import annotations

import numpy as np


def page_bounds(k, page_size: int) -> tuple[np.ndarray, np.ndarray]:
    """Maxima and minima ``[pages, Hk, D]`` of the columns of ``k [S, Hk, D]`` in each page."""
    pages = [k[at : at + page_size] for at in range(0, len(k), page_size)]
    return np.stack([p.max(axis=0) for p in pages]), np.stack([p.min(axis=0) for p in pages])


def bound_scores(q, maxima, minima) -> np.ndarray:
    """The bounds ``[Hk, pages]`` of the products of a row ``q [Hq, D]``: the largest of a group."""
    num_kv_heads = maxima.shape[1]
    groups = np.asarray(q, np.float64).reshape(num_kv_heads, -1, q.shape[-1])
    high, low = (np.asarray(x, np.float64).transpose(1, 0, 2)[:, None] for x in (maxima, minima))
    rows = groups[:, :, None]  # [Hk, group, 1, D] beside [Hk, 1, pages, D]
    return np.maximum(rows * high, rows * low).sum(axis=-1).max(axis=1)


def choose_pages(scores, k: int) -> np.ndarray:
    """The pages ``[Hk, k]`` of the largest scores, the first and the last page always, then -1."""
    chosen = np.full((len(scores), k), -1)
    for row, of_head in zip(chosen, np.array(scores), strict=True):
        of_head[[0, -1]] = np.inf
        best = np.sort(np.argsort(-of_head, kind="stable")[:k])
        row[: len(best)] = best
    return chosen
