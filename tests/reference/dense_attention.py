# SPDX-License-Identifier: Apache-2.0
"""The specification of attention to K and V: masks, the softmax, ALiBi, learned sinks, merges."""

from __future__ import annotations

import math

import numpy as np

_SCORES_AT_ONCE = 1 << 14  # heads are taken together while their scores fit a cache


def first_seen(position: np.ndarray, window: int | None) -> np.ndarray:
    """The first position that the row at a position sees.

    With a window it sees the last `window` positions up to and including its own, or, with a
    negative one, those of its chunk of ``-window`` positions.
    """
    if window is None:
        return np.zeros_like(position)
    return position - position % -window if window < 0 else position + 1 - window


def causal_mask(
    num_rows: int, kv_len: int, window: int | None = None, offset: int = 0, reach=0
) -> np.ndarray:
    """``[num_rows, kv_len]``: the rows are the last positions; each sees itself and the past.

    With a window each sees positions from `first_seen` on; the first column is at `offset`. With
    `reach`, ``[num_rows]``, each sees so many columns behind its own as well.
    """
    column = offset + np.arange(kv_len)[None, :]
    row = offset + kv_len - num_rows + np.arange(num_rows)[:, None]
    return (column <= row + np.reshape(reach, (-1, 1))) & (column >= first_seen(row, window))


def span_mask(begin: int, end: int, spans, window: int | None) -> np.ndarray:
    """``[end - begin, end]``: what rows see, by ``AND(window, OR(causal, same span))``."""
    row, column = np.arange(begin, end)[:, None], np.arange(end)[None, :]
    mask = column <= row
    for first, last in spans:
        mask |= (row >= first) & (row < last) & (column >= first) & (column < last)
    return mask & (column >= first_seen(row, window))


def past_mask(num_rows: int, kv_len: int, window: int | None = None, offset: int = 0) -> np.ndarray:
    """``[num_rows, kv_len]``: the rows follow the positions; what `causal_mask` leaves of them."""
    return causal_mask(num_rows, kv_len + num_rows, window, offset)[:, :kv_len]


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
    o : float64 ``[T, Hq, Dv]`` and lse : float64 ``[T, Hq]``, base 2; see `softmax_sum` for values
    that are not finite. Positions that a row does not see may hold anything.
    """
    q, k, v = (np.asarray(x, dtype=np.float64).swapaxes(0, 1) for x in (q, k, v))
    num_qo_heads, num_rows, _ = q.shape
    group = num_qo_heads // len(k)
    o = np.zeros((num_rows, num_qo_heads, v.shape[-1]))
    lse = np.full((num_rows, num_qo_heads), -np.inf)
    at_once = max(1, _SCORES_AT_ONCE // max(1, mask.size))
    for first in range(0, num_qo_heads, at_once):
        heads = np.arange(first, min(first + at_once, num_qo_heads))
        k_of_heads, v_of_heads = k[heads // group], v[heads // group]
        scores = q[heads] @ k_of_heads.swapaxes(1, 2) * sm_scale
        if softcap is not None:
            scores = softcap * np.tanh(scores / softcap)
        if bias is not None:
            scores = scores + bias[heads]
        scores = scores * math.log2(math.e)
        finite = np.isfinite(scores) & np.isfinite(v_of_heads).all(axis=-1)[:, None]
        usual = mask.any(axis=1) & (finite | ~mask).all(axis=2)
        usual_o, usual_lse = _usual_softmax_sums(scores, mask & usual[..., None], v_of_heads)
        o[:, heads], lse[:, heads] = usual_o.swapaxes(0, 1), usual_lse.T
        for i, t in np.argwhere(~usual):
            seen = mask[t]
            o[t, heads[i]], lse[t, heads[i]] = softmax_sum(scores[i, t, seen], v_of_heads[i, seen])
    return (o, lse) if sinks is None else apply_sinks(o, lse, sinks)


def _usual_softmax_sums(scores, mask, v) -> tuple[np.ndarray, np.ndarray]:
    """`softmax_sum` of all rows at once, which see finite numbers only, or nothing.

    Parameters
    ----------
    scores, mask : ``[H, T, S]``; v : ``[H, S, Dv]``

    Returns
    -------
    o : ``[H, T, Dv]`` and lse : ``[H, T]``, base 2.
    """
    sees = mask.any(axis=-1)
    seen = np.where(mask, scores, -np.inf)
    top = np.where(sees, seen.max(axis=-1, initial=-np.inf), 0.0)
    weights = np.exp2(seen - top[..., None])
    total = np.where(sees, weights.sum(axis=-1), 1.0)
    o = weights @ np.where(np.isfinite(v), v, 0.0) / total[..., None]
    return o, top + np.log2(total)


def softmax_sum(scores: np.ndarray, v: np.ndarray) -> tuple[np.ndarray, float]:
    """Weigh the positions that one row sees: the specification of each row.

    * A score that is NaN or +inf makes `o` and `lse` NaN.
    * A score of -inf is a weight of 0. A row without any other score, or any score at all, has
      ``lse = -inf`` and a total of 0, by which nothing is divided: ``o`` is the sum itself.
    * V is weighted as IEEE 754 says, a weight of 0 included: NaN in a column of V is NaN in that
      column of `o`, and `lse`, which does not depend on V, is still a number. Infinity in V is
      infinity or NaN in `o`; kernels may give either.

    Parameters
    ----------
    scores : ``[S]``, base 2; v : ``[S, Dv]``

    Returns
    -------
    o : ``[Dv]`` and lse, base 2.
    """
    if np.isnan(scores).any() or np.isposinf(scores).any():
        return np.full(v.shape[-1], np.nan), np.nan
    finite = scores[np.isfinite(scores)]
    top = finite.max() if finite.size else 0.0
    weights = np.exp2(scores - top)
    total = weights.sum()
    o = (weights[:, None] * v).sum(axis=0)
    return (o / total, top + math.log2(total)) if total > 0 else (o, -np.inf)


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
    """Let ``sinks [H]`` into the softmax of ``o [T, H, D]``, ``lse [T, H]``.

    A sink is a state of its own whose `o` is 0.
    """
    o = np.asarray(o, np.float64)
    sink_lse = np.broadcast_to(np.asarray(sinks, np.float64) * math.log2(math.e), np.shape(lse))
    return merge(o, lse, np.zeros_like(o), sink_lse)


def merge(o: np.ndarray, lse: np.ndarray, o_other: np.ndarray, lse_other: np.ndarray):
    """Combine two attention states ``o [T, H, D]``, ``lse [T, H]`` over disjoint positions.

    A state whose lse is -inf counts for nothing, whatever its `o` holds. One whose lse is NaN or
    +inf makes the row NaN.
    """
    lses = np.stack([lse, lse_other]).astype(np.float64)
    states = np.stack([o, o_other]).astype(np.float64)
    states[np.isneginf(lses)] = 0.0
    undefined = (np.isnan(lses) | np.isposinf(lses)).any(axis=0)
    lses[:, undefined] = 0.0
    top = lses.max(axis=0)
    weights = np.exp2(lses - np.where(np.isneginf(top), 0.0, top))
    total = weights.sum(axis=0)
    with np.errstate(divide="ignore"):
        merged_lse = np.where(total > 0, top + np.log2(total), -np.inf)
    merged = (states * weights[..., None]).sum(axis=0) / np.where(total > 0, total, 1.0)[..., None]
    merged[undefined], merged_lse[undefined] = np.nan, np.nan
    return merged, merged_lse
