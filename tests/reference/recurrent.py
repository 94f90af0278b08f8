# SPDX-License-Identifier: Apache-2.0
"""Linear attention, token by token in float64, and the rows in which its ingredients are kept."""

from __future__ import annotations

import ml_dtypes  # noqa: F401  (registers bfloat16 with NumPy)
import numpy as np


def recurrence(
    q: np.ndarray,
    k: np.ndarray,
    v: np.ndarray,
    log_decay: np.ndarray,
    beta: np.ndarray | None,
    state: np.ndarray,
    scale: float,
    state_dtype: str = "float64",
) -> tuple[np.ndarray, np.ndarray]:
    """Take a state through the tokens of a sequence.

    Parameters
    ----------
    q, k : ``[T, key heads, key_dim]``
    v : ``[T, heads, value_dim]``
    log_decay : ``[T, heads]`` or ``[T, heads, key_dim]``
    beta : ``[T, heads]``
        None: v is written as it is, without a delta rule.
    state : ``[heads, key_dim, value_dim]``
        Before the first token.
    scale : float
        Factor on q.
    state_dtype : str
        To which the state is rounded after each token.

    Returns
    -------
    o : float64 ``[T, heads, value_dim]``
    states : float64 ``[T + 1, heads, key_dim, value_dim]``
        Before the first token and after each one.
    """
    q, k, v, log_decay, state = (np.asarray(x, np.float64) for x in (q, k, v, log_decay, state))
    num_tokens, num_heads = v.shape[:2]
    shared = num_heads // q.shape[1]
    outputs, states = np.zeros(v.shape), [state]
    for t in range(num_tokens):
        key, query = np.repeat(k[t], shared, 0), np.repeat(q[t], shared, 0)
        decay = np.exp(log_decay[t]).reshape(num_heads, -1, 1)
        state = decay * state
        written = v[t]
        if beta is not None:
            recalled = np.einsum("hkv,hk->hv", state, key)
            written = np.asarray(beta[t], np.float64)[:, None] * (written - recalled)
        state = state + key[:, :, None] * written[:, None, :]
        state = state.astype(state_dtype).astype(np.float64)
        outputs[t] = scale * np.einsum("hkv,hk->hv", state, query)
        states.append(state)
    return outputs, np.stack(states)


def ingredient_rows(
    k: np.ndarray, v: np.ndarray, log_decay: np.ndarray, beta: np.ndarray | None
) -> np.ndarray:
    """Return the rows that tokens have in pages, of the type of k, which v has too.

    A row is k, v, then log_decay and beta as float32. Each begins at a multiple of 16 bytes, as the
    next row does; what is between them are ones, which are NaN.
    """
    gates = [np.float32(x) for x in (log_decay, beta) if x is not None]
    parts = []
    for part in (k, v, *gates):
        width = int(np.prod(part.shape[1:]))
        contents = np.ascontiguousarray(part).reshape(len(part), width).view(np.uint8)
        parts.append(np.pad(contents, ((0, 0), (0, -contents.shape[1] % 16)), constant_values=255))
    return np.concatenate(parts, axis=1).view(k.dtype)


def causal_conv(
    x: np.ndarray,
    taps: np.ndarray,
    weight: np.ndarray,
    bias: np.ndarray | None,
    activation: str | None,
) -> np.ndarray:
    """Return rows of a causal convolution.

    Parameters
    ----------
    x : ``[T, channels]``
    taps : ``[T, width - 1, channels]``
        The rows before each one, the next one last; zeros where there are none.
    weight : ``[channels, width]``
    bias : ``[channels]`` or None
    activation : {"silu"}, optional

    Returns
    -------
    float64 ``[T, channels]``
    """
    rows = np.concatenate([taps, x[:, None]], axis=1).astype(np.float64)
    sums = np.einsum("tic,ci->tc", rows, weight.astype(np.float64))
    if bias is not None:
        sums = sums + bias.astype(np.float64)
    return sums / (1 + np.exp(-sums)) if activation == "silu" else sums
