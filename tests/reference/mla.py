# SPDX-License-Identifier: Apache-2.0
"""The specification of MLA: attention to latent rows, and what they are before absorption."""

from __future__ import annotations

import numpy as np

from .dense_attention import attention


def mla_absorbed(q, latent, v_head_dim: int, mask, sm_scale: float):
    """Attention of ``q [T, Hq, D]`` to ``latent [S, D]``: K is the row, V its first columns."""
    k = np.asarray(latent)[:, None, :]  # one head of K and V for all query heads
    return attention(q, k, k[..., :v_head_dim], mask, sm_scale)


def mla_expand(latent, w_k, w_v) -> tuple[np.ndarray, np.ndarray]:
    """K and V of every head, as they are before absorption.

    Parameters
    ----------
    latent : ``[S, Dckv + Dkpe]``; w_k : ``[Hq, Dnope, Dckv]``; w_v : ``[Hq, Dv, Dckv]``

    Returns
    -------
    k : ``[S, Hq, Dnope + Dkpe]``, v : ``[S, Hq, Dv]``
    """
    latent, w_k, w_v = (np.asarray(x, np.float64) for x in (latent, w_k, w_v))
    ckv, kpe = np.split(latent, [w_k.shape[2]], axis=1)
    k = np.einsum("sc,hdc->shd", ckv, w_k)
    kpe = np.broadcast_to(kpe[:, None], (len(k), k.shape[1], kpe.shape[1]))
    return np.concatenate([k, kpe], axis=-1), np.einsum("sc,hdc->shd", ckv, w_v)


def mla_absorb(q, w_k) -> np.ndarray:
    """``q [T, Hq, Dnope + Dkpe]`` as it meets latent rows: ``[T, Hq, Dckv + Dkpe]``."""
    nope, kpe = np.split(np.asarray(q, np.float64), [w_k.shape[1]], axis=-1)
    return np.concatenate([np.einsum("thd,hdc->thc", nope, np.asarray(w_k, np.float64)), kpe], -1)
