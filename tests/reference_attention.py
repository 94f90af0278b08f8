# SPDX-License-Identifier: Apache-2.0
"""The specification of attention to K and V: masks, the softmax, ALiBi, learned sinks, merges."""

from __future__ import annotations

import math

import numpy as np


def causal_mask(num_rows: int, kv_len: int, window: int | None = None) -> np.ndarray:
    """``[num_rows, kv_len]``: the rows are the last positions; each sees itself and the past.

    With a window each sees the last `window` positions up to and including its own.
    """
    row, column = kv_len - num_rows + np.arange(num_rows)[:, None], np.arange(kv_len)[None, :]
    return (column <= row) & (True if window is None else column > row - window)


def past_mask(num_rows: int, kv_len: int, window: int | None = None) -> np.ndarray:
    """``[num_rows, kv_len]``: the rows follow the positions; what `causal_mask` leaves of them."""
    return causal_mask(num_rows, kv_len + num_rows, window)[:, :kv_len]


def attention(
    q: np.ndarray,
    k: np.ndarray,
    v: np.ndarray,
    mask: np.ndarray,
    sm_scale: float,
    softcap: float | None = None,
    sinks: np.ndarray | None = None,
    bias: np.ndarray | None = None,
) -> tuple[np.ndarray, np.ndarray]:
    """Attention of one sequence.

    Parameters
    ----------
    q : ``[T, Hq, Dqk]``; k : ``[S, Hk, Dqk]``; v : ``[S, Hk, Dv]``
    mask : bool ``[T, S]``, True where row t sees position s.
    sm_scale : float
    softcap : float, optional
        A logit x becomes ``softcap * tanh(x / softcap)``.
    sinks : ``[Hq]``, optional
        A logit of each head that joins the softmax, with nothing behind it.
    bias : ``[Hq, T, S]``, optional
        Added to the logits, after the soft-cap.

    Returns
    -------
    o : float64 ``[T, Hq, Dv]`` and lse : float64 ``[T, Hq]``, base 2. A row that sees nothing gives
    ``o = 0`` and ``lse = -inf``.
    """
    q, k, v = (np.asarray(x, dtype=np.float64) for x in (q, k, v))
    num_rows, num_qo_heads, _ = q.shape
    o = np.zeros((num_rows, num_qo_heads, v.shape[-1]))
    lse = np.full((num_rows, num_qo_heads), -np.inf)
    group = num_qo_heads // k.shape[1]
    for h in range(num_qo_heads):
        scores = q[:, h] @ k[:, h // group].T * sm_scale
        if softcap is not None:
            scores = softcap * np.tanh(scores / softcap)
        if bias is not None:
            scores = scores + bias[h]
        scores = scores * math.log2(math.e)
        scores = np.where(mask, scores, -np.inf)
        for t in range(num_rows):
            if mask[t].any():
                top = scores[t].max()
                p = np.exp2(scores[t] - top)
                lse[t, h] = top + math.log2(p.sum())
                o[t, h] = p @ v[:, h // group] / p.sum()
    return (o, lse) if sinks is None else apply_sinks(o, lse, sinks)


def alibi_slopes(num_heads: int) -> list[float]:
    """The slopes of Press et al. (2022), as their code has them, for any number of heads."""
    if math.log2(num_heads).is_integer():
        start = 2 ** (-(2 ** -(math.log2(num_heads) - 3)))
        return [start * start**i for i in range(num_heads)]
    closest = 2 ** math.floor(math.log2(num_heads))
    return alibi_slopes(closest) + alibi_slopes(2 * closest)[0::2][: num_heads - closest]


def alibi_bias(slopes, q_positions, k_positions) -> np.ndarray | None:
    """``[Hq, T, S]``: slopes times distances; None without slopes."""
    if slopes is None:
        return None
    distance = np.asarray(k_positions)[None, :] - np.asarray(q_positions, np.int64)[:, None]
    return np.asarray(slopes, np.float64)[:, None, None] * distance


def apply_sinks(o: np.ndarray, lse: np.ndarray, sinks: np.ndarray):
    """Let ``sinks [H]`` into the softmax of ``o [T, H, D]``, ``lse [T, H]``."""
    o, lse = np.asarray(o, np.float64), np.asarray(lse, np.float64)
    with_sink = np.logaddexp2(lse, np.asarray(sinks, np.float64) * math.log2(math.e))
    nothing = np.isinf(with_sink)
    share = np.where(nothing, 0.0, np.exp2(lse - np.where(nothing, 0.0, with_sink)))
    return o * share[..., None], with_sink


def merge(o: np.ndarray, lse: np.ndarray, o_other: np.ndarray, lse_other: np.ndarray):
    """Combine two attention states ``o [T, H, D]``, ``lse [T, H]`` over disjoint positions."""
    o, o_other = np.asarray(o, np.float64), np.asarray(o_other, np.float64)
    lse, lse_other = np.asarray(lse, np.float64), np.asarray(lse_other, np.float64)
    top = np.maximum(lse, lse_other)
    safe = np.where(np.isinf(top), 0.0, top)
    w, w_other = np.exp2(lse - safe), np.exp2(lse_other - safe)
    total = w + w_other
    with np.errstate(divide="ignore"):
        merged_lse = np.where(total > 0, safe + np.log2(total), -np.inf)
    total = np.where(total > 0, total, 1.0)
    merged = (o * w[..., None] + o_other * w_other[..., None]) / total[..., None]
    return merged, merged_lse
