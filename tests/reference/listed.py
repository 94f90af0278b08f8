# SPDX-License-Identifier: Apache-2.0
"""The specification of attention to lists: each row sees the positions that it lists."""

from __future__ import annotations

import numpy as np

from .dense_attention import attention
from .mla import mla_absorbed


def listed_positions(positions, own: int) -> np.ndarray:
    """The positions of a list that its row, which is at position `own`, sees."""
    positions = np.asarray(positions)
    return positions[(positions >= 0) & (positions <= own)]


def listed_attention(q, k, v, positions, owns, sm_scale, softcap=None):
    """Attention of ``q [T, Hq, D]`` to listed rows of ``k, v [S, Hk, D]``.

    Parameters
    ----------
    positions : int ``[T, width]``
        Rows of k and v; those that a row does not see do not count, repeated ones count again.
    owns : ``[T]``
        The position of each row.

    Returns
    -------
    o ``[T, Hq, D]``, lse ``[T, Hq]`` : float64
    """
    parts = []
    for row, own, listed in zip(q, owns, positions, strict=True):
        at = listed_positions(listed, own)
        parts.append(
            attention(row[None], k[at], v[at], np.ones((1, len(at)), bool), sm_scale, softcap)
        )
    o, lse = zip(*parts, strict=True)
    return np.concatenate(o), np.concatenate(lse)


def listed_latent_attention(q, latent, v_head_dim: int, positions, owns, sm_scale):
    """The same over latent rows ``[S, D]``."""
    parts = []
    for row, own, listed in zip(q, owns, positions, strict=True):
        at = listed_positions(listed, own)
        mask = np.ones((1, len(at)), bool)
        parts.append(mla_absorbed(row[None], latent[at], v_head_dim, mask, sm_scale))
    o, lse = zip(*parts, strict=True)
    return np.concatenate(o), np.concatenate(lse)


def positions_of_blocks(blocks, block_size: int, own: int) -> np.ndarray:
    """The positions of a list of blocks that its row, which is at position `own`, sees."""
    ranges = [
        np.arange(b * block_size, min((b + 1) * block_size, own + 1)) for b in blocks if b >= 0
    ]
    return np.concatenate([np.zeros(0, int), *ranges])


def expand_blocks(blocks, block_size: int, owns) -> np.ndarray:
    """Lists ``[T, lists, width]`` of blocks as lists of positions ``[T, lists, width * size]``."""
    blocks = np.asarray(blocks)
    positions = np.full((*blocks.shape[:2], blocks.shape[2] * block_size), -1)
    for row, own in enumerate(owns):
        for i, listed in enumerate(blocks[row]):
            seen = positions_of_blocks(listed, block_size, own)
            positions[row, i, : len(seen)] = seen
    return positions


def attention_by_heads(q, k, v, positions, owns, sm_scale, softcap=None):
    """`listed_attention` with ``positions [T, lists, width]``: each for some of the KV heads."""
    parts, num_lists = [], positions.shape[1]
    for i in range(num_lists):
        heads, kv_heads = (
            slice(i * n // num_lists, (i + 1) * n // num_lists) for n in (q.shape[1], k.shape[1])
        )
        rows = q[:, heads], k[:, kv_heads], v[:, kv_heads]
        parts.append(listed_attention(*rows, positions[:, i], owns, sm_scale, softcap))
    return tuple(np.concatenate(x, axis=1) for x in zip(*parts, strict=True))
