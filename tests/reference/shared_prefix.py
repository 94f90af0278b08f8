# SPDX-License-Identifier: Apache-2.0
"""The specification of attention to shared pages: rows of several sequences, merged in place."""

from __future__ import annotations

import numpy as np

from .. import reference


def shared_attention(
    q, pages, segments, o, lse, sm_scale, *, inline=None, softcap=None, alibi=None
):
    """Merge into `o` and `lse` what the rows see in segments of shared pages.

    Parameters
    ----------
    q : ``[T, Hq, D]``; pages : ``[P, 2, Hk, page, D]``; o : ``[T, Hq, D]``; lse : ``[T, Hq]``
    segments : list of (page ids, row ids, position of the first slot)
        Every row of a segment sees all of its slots.
    inline : tuple (Rope, query_positions ``[T]``), optional
        Rotate Q and K here.
    softcap : float, optional
    alibi : tuple (slopes ``[Hq]``, q_positions ``[T]``), optional

    Returns
    -------
    o, lse : float64
    """
    o, lse = np.array(o, np.float64), np.array(lse, np.float64)
    for page_ids, rows, first_position in segments:
        page_size = pages.shape[3]
        k, v = reference.gather_slots(
            pages, reference.sequence_slots(page_ids, page_size, page_size)
        )
        q_rows = q[rows]
        if inline is not None:
            rope, q_positions = inline
            q_rows = reference.rotate(q_rows, q_positions[rows], rope)
            k = reference.rotate(k, first_position + np.arange(len(k)), rope)
        sees_all = np.ones((len(rows), len(k)), bool)
        bias = None
        if alibi is not None:
            slopes, q_positions = alibi
            k_positions = first_position + np.arange(len(k))
            bias = reference.alibi_bias(slopes, q_positions[rows], k_positions)
        part = reference.attention(q_rows, k, v, sees_all, sm_scale, softcap, bias=bias)
        o[rows], lse[rows] = reference.merge(o[rows], lse[rows], *part)
    return o, lse


def shared_latent_attention(q, pages, segments, o, lse, sm_scale):
    """The same over latent rows: pages ``[P, page, D]``, o ``[T, Hq, Dv]``."""
    o, lse = np.array(o, np.float64), np.array(lse, np.float64)
    for page_ids, rows, _ in segments:
        latent = pages[page_ids].reshape(-1, pages.shape[2])
        sees_all = np.ones((len(rows), len(latent)), bool)
        part = reference.mla_absorbed(q[rows], latent, o.shape[2], sees_all, sm_scale)
        o[rows], lse[rows] = reference.merge(o[rows], lse[rows], *part)
    return o, lse
