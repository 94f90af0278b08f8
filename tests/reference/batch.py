# SPDX-License-Identifier: Apache-2.0
"""The specification of the attention kernels: a batch of sequences, ragged or over its pages."""

from __future__ import annotations

import numpy as np

from .dense_attention import alibi_bias, attention, causal_mask, past_mask
from .mla import mla_absorbed
from .pages import gather_slots, sequence_slots
from .rope import rotate


def paged_attention(
    q,
    query_indptr,
    pages,
    page_indptr,
    page_ids,
    last_page_len,
    sm_scale,
    *,
    causal=True,
    inline=None,
    window=None,
    k_offsets=None,
    reach=None,
    softcap=None,
    alibi=None,
    v_width=None,
):
    """Attention of a batch over its pages.

    Parameters
    ----------
    q : ``[T, Hq, D]``; query_indptr : ``[B + 1]``; pages : ``[P, 2, Hk, page, D]``
    page_indptr, page_ids, last_page_len : the page table, as the kernels take it.
    causal : bool
        Whether the rows are the last positions of the pages, or follow them.
    inline : tuple (Rope, query_positions ``[T]``, first_positions ``[B]``), optional
        Rotate Q and K here.
    window : int, optional
        As for `first_seen`.
    k_offsets : ``[B]``, optional
        Position of the first column, which chunks depend on; 0 by default.
    reach : ``[T]``, optional
        How many columns behind its own a row sees, where `causal`.
    softcap : float, optional
    alibi : tuple (slopes ``[Hq]``, q_positions ``[T]``, first_positions ``[B]``), optional
    v_width : int, optional
        Columns of a row that are V, if the pages hold wider ones; K has as many as `q`.
    """
    page_size = pages.shape[3]
    parts = []
    for b in range(len(query_indptr) - 1):
        ids = page_ids[page_indptr[b] : page_indptr[b + 1]]
        parts.append(gather_slots(pages, sequence_slots(ids, last_page_len[b], page_size)))
    k, v = (np.concatenate(rows) for rows in zip(*parts, strict=True))
    k, v = k[..., : q.shape[-1]], v[..., :v_width]
    kv_indptr = np.cumsum([0, *(len(rows) for rows, _ in parts)])
    return ragged_attention(
        q, query_indptr, k, v, kv_indptr, sm_scale,
        causal=causal, inline=inline, window=window, k_offsets=k_offsets, reach=reach,
        softcap=softcap, alibi=alibi,
    )  # fmt: skip


def ragged_attention(
    q, query_indptr, k, v, kv_indptr, sm_scale, *,
    causal=True, inline=None, softcap=None, alibi=None,
    window=None, k_offsets=None, reach=None,
):  # fmt: skip
    """Do what `paged_attention` does, with K and V ``[S, Hk, D]`` by ``kv_indptr [B + 1]``."""
    outputs, lses = [], []
    for b in range(len(query_indptr) - 1):
        rows, columns = (
            slice(query_indptr[b], query_indptr[b + 1]),
            slice(kv_indptr[b], kv_indptr[b + 1]),
        )
        q_rows, k_rows = q[rows], k[columns]
        num_rows, kv_len = len(q_rows), len(k_rows)
        if inline is not None:
            rope, q_positions, first_positions = inline
            q_rows = rotate(q_rows, q_positions[rows], rope)
            k_rows = rotate(k_rows, first_positions[b] + np.arange(kv_len), rope)
        offset = 0 if k_offsets is None else k_offsets[b]
        mask = (causal_mask if causal else past_mask)(num_rows, kv_len, window, offset)
        if reach is not None and causal:
            mask = causal_mask(num_rows, kv_len, window, offset, reach[rows])
        bias = None
        if alibi is not None:
            slopes, q_positions, first_positions = alibi
            bias = alibi_bias(slopes, q_positions[rows], first_positions[b] + np.arange(kv_len))
        o, lse = attention(q_rows, k_rows, v[columns], mask, sm_scale, softcap, bias=bias)
        outputs.append(o)
        lses.append(lse)
    return np.concatenate(outputs), np.concatenate(lses)


def mla_paged_attention(
    q,
    query_indptr,
    pages,
    page_indptr,
    page_ids,
    last_page_len,
    v_head_dim: int,
    sm_scale: float,
    *,
    causal=True,
    window=None,
):
    """Do what `paged_attention` does, with latent rows in ``pages [P, page, D]``."""
    outputs, lses = [], []
    page_size = pages.shape[1]
    for b in range(len(query_indptr) - 1):
        q_rows = q[query_indptr[b] : query_indptr[b + 1]]
        ids = page_ids[page_indptr[b] : page_indptr[b + 1]]
        slots = sequence_slots(ids, last_page_len[b], page_size)
        latent = pages[slots // page_size, slots % page_size]
        shape = len(q_rows), len(latent)
        mask = (causal_mask if causal else past_mask)(*shape, window)
        o, lse = mla_absorbed(q_rows, latent, v_head_dim, mask, sm_scale)
        outputs.append(o)
        lses.append(lse)
    return np.concatenate(outputs), np.concatenate(lses)
