# SPDX-License-Identifier: Apache-2.0
"""The specification in plain NumPy: obviously right, slow, and what every test compares with.

Tensors may be of any float type; sums run in float64. `lse` is base 2, as in the kernels.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

# Largest acceptable error, relative to the largest magnitude that is compared (at least 1).
# float32: sums over a few thousand terms and the kernels' polynomial exp2 (3e-6).
# float16, bfloat16: one rounding of the result, and of P before it multiplies V.
TOLERANCES = {"float32": 2e-5, "float16": 2e-3, "bfloat16": 1.6e-2}


def assert_close(actual: Any, expected: Any, dtype: str, what: str = "result") -> None:
    """Compare with the table of tolerances; infinities must match exactly, NaN never does."""
    actual = np.asarray(actual, dtype=np.float64)
    expected = np.asarray(expected, dtype=np.float64)
    assert actual.shape == expected.shape, f"{what}: shape {actual.shape} != {expected.shape}"
    if actual.size == 0:
        return
    infinite = np.isinf(expected)
    np.testing.assert_array_equal(actual[infinite], expected[infinite], err_msg=what)
    finite_actual, finite_expected = actual[~infinite], expected[~infinite]
    assert np.isfinite(finite_actual).all(), f"{what}: {np.isnan(actual).sum()} NaN"
    if finite_expected.size == 0:
        return
    scale = max(1.0, np.abs(finite_expected).max())
    error = np.abs(finite_actual - finite_expected).max() / scale
    assert error <= TOLERANCES[dtype], f"{what}: error {error:.2e} > {TOLERANCES[dtype]:.0e}"


# --- rotary position embedding ------------------------------------------------------------------


@dataclass(frozen=True)
class Rope:
    """A rotation: base, factor on the position, rotated dims, Hugging Face scaling dictionary."""

    theta: float = 10000.0
    scale: float = 1.0
    rotary_dim: int = 128
    scaling: dict = field(default_factory=dict)


def inverse_frequencies(rope: Rope, use_long: bool = False) -> tuple[np.ndarray, float]:
    """Return float32 inverse frequencies ``[rotary_dim / 2]`` and the factor on cos and sin.

    Sources: Su et al., RoFormer (2021); Llama 3.1 report; Peng et al., YaRN (2023); Ding et al.,
    LongRoPE (2024); the field names are those of Hugging Face configurations.
    """
    dim, theta, scaling = rope.rotary_dim, rope.theta, dict(rope.scaling)
    kind = scaling.get("rope_type", "default")
    inverse = 1.0 / theta ** (np.arange(0, dim, 2, dtype=np.float64) / dim)
    attention = 1.0
    if kind == "linear":
        inverse = inverse / scaling["factor"]
    elif kind == "llama3":
        low = scaling["original_max_position_embeddings"] / scaling["low_freq_factor"]
        high = scaling["original_max_position_embeddings"] / scaling["high_freq_factor"]
        for i, f in enumerate(inverse):
            wavelength = 2 * math.pi / f
            if wavelength > low:
                inverse[i] = f / scaling["factor"]
            elif wavelength > high:
                smooth = (low / wavelength - 1) / (low / high - 1)
                inverse[i] = (1 - smooth) * f / scaling["factor"] + smooth * f
    elif kind == "yarn":
        factor = scaling["factor"]
        original = scaling["original_max_position_embeddings"]

        def dimension_of(rotations: float) -> float:
            return dim * math.log(original / (rotations * 2 * math.pi)) / (2 * math.log(theta))

        low = dimension_of(scaling.get("beta_fast") or 32)
        high = dimension_of(scaling.get("beta_slow") or 1)
        if scaling.get("truncate", True):
            low, high = math.floor(low), math.ceil(high)
        low, high = max(low, 0), min(high, dim - 1)
        if low == high:
            high += 0.001
        ramp = np.clip((np.arange(dim // 2) - low) / (high - low), 0, 1)
        inverse = inverse / factor * ramp + inverse * (1 - ramp)

        def magnitude(m: float = 1.0) -> float:
            return 0.1 * m * math.log(factor) + 1.0 if factor > 1 else 1.0

        attention = scaling.get("attention_factor")
        if attention is None:
            mscale, mscale_all = scaling.get("mscale"), scaling.get("mscale_all_dim")
            both = mscale and mscale_all
            attention = magnitude(mscale) / magnitude(mscale_all) if both else magnitude()
    elif kind == "longrope":
        original = scaling["original_max_position_embeddings"]
        factors = scaling["long_factor" if use_long else "short_factor"]
        inverse = inverse / np.asarray(factors, dtype=np.float32).astype(np.float64)
        factor = (
            scaling.get("factor") or scaling.get("max_position_embeddings", original) / original
        )
        attention = scaling.get("attention_factor")
        if attention is None:
            attention = math.sqrt(1 + math.log(factor) / math.log(original)) if factor > 1 else 1.0
    elif kind != "default":
        raise ValueError(f"no reference for rope_type {kind!r}")
    return inverse.astype(np.float32), float(attention)


def rotate(
    x: np.ndarray, positions: np.ndarray, rope: Rope, total: int | None = None
) -> np.ndarray:
    """Rotate ``x [T, H, D]`` by ``positions [T]``; dimension i pairs with i + rotary_dim / 2.

    `total` is the length of the sequence after the step; longrope chooses its factors by it (None:
    the last position of `positions` plus one).
    """
    x = np.asarray(x, dtype=np.float64)
    if len(x) == 0:
        return x
    total = int(positions.max()) + 1 if total is None else total
    limit = rope.scaling.get("original_max_position_embeddings", math.inf)
    inverse, attention = inverse_frequencies(rope, use_long=total > limit)
    scaled = np.asarray(positions, dtype=np.float32) * np.float32(rope.scale)
    angle = (scaled[:, None] * inverse[None, :]).astype(np.float64)  # float32, as models compute it
    cos, sin = np.cos(angle)[:, None] * attention, np.sin(angle)[:, None] * attention
    half = rope.rotary_dim // 2
    a, b, rest = x[..., :half], x[..., half : 2 * half], x[..., 2 * half :]
    return np.concatenate([a * cos - b * sin, b * cos + a * sin, rest], axis=-1)


# --- attention ----------------------------------------------------------------------------------


def causal_mask(num_rows: int, kv_len: int, window: int | None = None) -> np.ndarray:
    """``[num_rows, kv_len]``: the rows are the last positions; each sees itself and the past.

    With a window each sees the last `window` positions up to and including its own.
    """
    row, column = kv_len - num_rows + np.arange(num_rows)[:, None], np.arange(kv_len)[None, :]
    return (column <= row) & (True if window is None else column > row - window)


def past_mask(num_rows: int, kv_len: int, window: int | None = None) -> np.ndarray:
    """``[num_rows, kv_len]``: the rows follow the positions; what `causal_mask` leaves of them."""
    return causal_mask(num_rows, kv_len + num_rows, window)[:, :kv_len]


def tree_mask(parents, num_rows: int, kv_len: int, window: int | None = None) -> np.ndarray:
    """``[num_rows, kv_len]``: the rows are the last nodes of a tree, the nodes the last positions.

    Every node sees what comes before the tree, its ancestors and itself; without nodes the mask is
    causal. `parents` gives every node's parent, -1 for a root. Nodes before the first position are
    left out. With a window a row sees what is less than `window` before it by `tree_positions`.
    """
    if len(parents) == 0:
        return causal_mask(num_rows, kv_len, window)
    n = len(parents)
    sees = np.eye(n, dtype=bool)
    for node, parent in enumerate(parents):
        if parent >= 0:
            sees[node] |= sees[parent]
    before = np.ones((num_rows, max(0, kv_len - n)), bool)
    mask = np.concatenate([before, sees[n - num_rows :, max(0, n - kv_len) :]], axis=1)
    if window is not None:
        positions = tree_positions(parents, max(n, kv_len))  # relative ones will do
        end = len(positions)
        mask &= positions[end - kv_len :] > positions[end - num_rows :, None] - window
    return mask


def tree_positions(parents, kv_len: int) -> np.ndarray:
    """``[kv_len]``: RoPE positions when the last ones are the nodes of a tree, by their depth."""
    before = kv_len - len(parents)
    return np.concatenate([np.arange(before), before + tree_depths(parents)])


def tree_path(parents, leaf: int) -> list[int]:
    """The nodes from the root above `leaf` down to it; -1 has none."""
    return [] if leaf < 0 else [*tree_path(parents, parents[leaf]), leaf]


def tree_depths(parents) -> np.ndarray:
    """Number of ancestors of every node."""
    depths = []
    for parent in parents:
        depths.append(depths[parent] + 1 if parent >= 0 else 0)
    return np.array(depths, np.int32)


def tree_order(parents) -> np.ndarray:
    """int32 ``[n, 2]``: every node's depth-first number, and the end of its subtree."""
    order = np.zeros((len(parents), 2), np.int32)
    sizes = np.ones(len(parents), np.int32)
    for node in reversed(range(len(parents))):
        if parents[node] >= 0:
            sizes[parents[node]] += sizes[node]
    following = {-1: 0}  # next number in the subtree of a node
    for node, parent in enumerate(parents):
        order[node] = following[parent], following[parent] + sizes[node]
        following[parent] += sizes[node]
        following[node] = order[node, 0] + 1
    return order


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


# --- pages --------------------------------------------------------------------------------------


def gather_slots(pages: np.ndarray, slots: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Rows of ``pages [P, 2, Hk, page, D]`` at ``slots [n]`` as K and V ``[n, Hk, D]``."""
    page_size = pages.shape[3]
    rows = pages[slots // page_size, :, :, slots % page_size]
    return rows[:, 0], rows[:, 1]


def append(pages: np.ndarray, k: np.ndarray, v: np.ndarray, position_map: np.ndarray) -> np.ndarray:
    """A copy of `pages` with ``k, v [T, Hk, D]`` written at the slots of ``position_map [T]``."""
    pages = pages.copy()
    page_size = pages.shape[3]
    for row, slot in enumerate(position_map):
        if slot >= 0:
            pages[slot // page_size, 0, :, slot % page_size] = k[row].astype(pages.dtype)
            pages[slot // page_size, 1, :, slot % page_size] = v[row].astype(pages.dtype)
    return pages


def sequence_slots(page_ids: np.ndarray, last_page_len: int, page_size: int) -> np.ndarray:
    """Slots of a sequence, in order of position."""
    if len(page_ids) == 0:
        return np.zeros(0, dtype=np.int64)
    slots = (np.asarray(page_ids)[:, None] * page_size + np.arange(page_size)).reshape(-1)
    return slots[: (len(page_ids) - 1) * page_size + last_page_len]


def paged_attention(
    q,
    q_indptr,
    pages,
    page_indptr,
    page_values,
    last_page_len,
    sm_scale,
    *,
    causal=True,
    inline=None,
    window=None,
    softcap=None,
    alibi=None,
):
    """Attention of a batch over its pages.

    Parameters
    ----------
    q : ``[T, Hq, D]``; q_indptr : ``[B + 1]``; pages : ``[P, 2, Hk, page, D]``
    page_indptr, page_values, last_page_len : the page table, as the kernels take it.
    causal : bool
        Whether the rows are the last positions of the pages, or follow them.
    inline : tuple (Rope, q_rope_position ``[T]``, k_rope_pos_offset ``[B]``), optional
        Rotate Q and K here.
    window : int, optional
        Positions that a row sees, its own included.
    softcap : float, optional
    alibi : tuple (slopes ``[Hq]``, q_positions ``[T]``, k_rope_pos_offset ``[B]``), optional
    """
    outputs, lses = [], []
    for b in range(len(q_indptr) - 1):
        rows = slice(q_indptr[b], q_indptr[b + 1])
        page_ids = page_values[page_indptr[b] : page_indptr[b + 1]]
        k, v = gather_slots(pages, sequence_slots(page_ids, last_page_len[b], pages.shape[3]))
        q_rows = q[rows]
        if inline is not None:
            rope, q_positions, k_offsets = inline
            q_rows = rotate(q_rows, q_positions[rows], rope)
            k = rotate(k, k_offsets[b] + np.arange(len(k)), rope)
        mask = (causal_mask if causal else past_mask)(len(q_rows), len(k), window)
        bias = None
        if alibi is not None:
            slopes, q_positions, k_offsets = alibi
            bias = alibi_bias(slopes, q_positions[rows], k_offsets[b] + np.arange(len(k)))
        o, lse = attention(q_rows, k, v, mask, sm_scale, softcap, bias=bias)
        outputs.append(o)
        lses.append(lse)
    return np.concatenate(outputs), np.concatenate(lses)


def ragged_attention(
    q, q_indptr, k, v, kv_indptr, sm_scale, *, causal=True, inline=None, softcap=None, alibi=None,
    window=None,
):  # fmt: skip
    """As `paged_attention`, with K and V ``[S, Hk, D]`` ragged by ``kv_indptr [B + 1]``."""
    outputs, lses = [], []
    for b in range(len(q_indptr) - 1):
        rows, columns = slice(q_indptr[b], q_indptr[b + 1]), slice(kv_indptr[b], kv_indptr[b + 1])
        q_rows, k_rows = q[rows], k[columns]
        num_rows, kv_len = len(q_rows), len(k_rows)
        if inline is not None:
            rope, q_positions, k_offsets = inline
            q_rows = rotate(q_rows, q_positions[rows], rope)
            k_rows = rotate(k_rows, k_offsets[b] + np.arange(kv_len), rope)
        mask = (causal_mask if causal else past_mask)(num_rows, kv_len, window)
        bias = None
        if alibi is not None:
            slopes, q_positions, k_offsets = alibi
            bias = alibi_bias(slopes, q_positions[rows], k_offsets[b] + np.arange(kv_len))
        o, lse = attention(q_rows, k_rows, v[columns], mask, sm_scale, softcap, bias=bias)
        outputs.append(o)
        lses.append(lse)
    return np.concatenate(outputs), np.concatenate(lses)


# --- MLA ----------------------------------------------------------------------------------------


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


def mla_paged_attention(
    q,
    q_indptr,
    pages,
    page_indptr,
    page_values,
    last_page_len,
    v_head_dim: int,
    sm_scale: float,
    *,
    causal=True,
):
    """As `paged_attention`, with latent rows in ``pages [P, page, D]``."""
    outputs, lses = [], []
    page_size = pages.shape[1]
    for b in range(len(q_indptr) - 1):
        q_rows = q[q_indptr[b] : q_indptr[b + 1]]
        page_ids = page_values[page_indptr[b] : page_indptr[b + 1]]
        slots = sequence_slots(page_ids, last_page_len[b], page_size)
        latent = pages[slots // page_size, slots % page_size]
        shape = len(q_rows), len(latent)
        mask = causal_mask(*shape) if causal else np.ones(shape, bool)
        o, lse = mla_absorbed(q_rows, latent, v_head_dim, mask, sm_scale)
        outputs.append(o)
        lses.append(lse)
    return np.concatenate(outputs), np.concatenate(lses)


def table_lengths(indptr: np.ndarray, last_page_len: np.ndarray, page_size: int) -> np.ndarray:
    """Lengths ``[B]`` of the sequences of a page table; 0 for one without a page."""
    num_pages = np.diff(indptr)
    return np.where(num_pages > 0, (num_pages - 1) * page_size + last_page_len, 0)


def append_at_positions(pages, rows, batch_indices, positions, indices, indptr) -> np.ndarray:
    """A copy of ``pages [P, page, ...]`` with ``rows [T, ...]`` at positions of its sequences."""
    pages = pages.copy()
    page_size = pages.shape[1]
    for row, b, position in zip(rows, batch_indices, positions, strict=True):
        if b >= 0:
            page = indices[indptr[b] + position // page_size]
            pages[page, position % page_size] = row.astype(pages.dtype)
    return pages


def vector_sparse_offsets(
    blocks, block_indptr, kv_lens, stride_block, stride_n, block_size
) -> list[np.ndarray]:
    """Per sequence, the offset of each of its positions."""
    return [
        blocks[block_indptr[b] + np.arange(n) // block_size] * stride_block
        + np.arange(n) % block_size * stride_n
        for b, n in enumerate(kv_lens)
    ]


# --- the cache ----------------------------------------------------------------------------------


class ReferenceCache:
    """What a cache holds: per sequence and layer the K and V rows, rounded to the page type.

    It has no pages and no capacity; tests that need those compute them from the lengths. `trees`
    has the parents of the nodes that are not committed, which are a sequence's last rows.

    Parameters
    ----------
    num_layers : int
    kv_dtype : numpy dtype of the pages.
    rope : Rope or None
    mode : {"none", "normal", "inline"}
    windows : one per layer, optional
        Positions that a row sees, its own included; None or 0: all.
    softcap : float, optional
    alibi : one sequence of slopes, or None, per layer, optional
    """

    def __init__(
        self,
        num_layers: int,
        kv_dtype,
        rope: Rope | None = None,
        mode: str = "none",
        windows: Sequence[int | None] | None = None,
        softcap: float | None = None,
        alibi: Sequence | None = None,
    ):
        self.softcap, self.alibi = softcap, alibi or [None] * num_layers
        self.num_layers, self.kv_dtype, self.rope, self.mode = num_layers, kv_dtype, rope, mode
        self.windows = [window or None for window in windows or [None] * num_layers]
        self.sequences: dict[int, list[tuple[np.ndarray, np.ndarray]]] = {}
        self.trees: dict[int, list[int]] = {}

    def add_sequence(self, seq_id: int) -> None:
        self.sequences[seq_id], self.trees[seq_id] = [None] * self.num_layers, []

    def remove_sequence(self, seq_id: int) -> None:
        del self.sequences[seq_id], self.trees[seq_id]

    def fork_sequence(self, parent_id: int, child_id: int, fork_pos: int = -1) -> None:
        end = self.length(parent_id) if fork_pos == -1 else fork_pos
        self.sequences[child_id] = [
            None if kv is None else tuple(x[:end] for x in kv) for kv in self.sequences[parent_id]
        ]
        self.trees[child_id] = []

    def pop_n(self, seq_id: int, n: int) -> None:
        end = self.length(seq_id) - n
        self.sequences[seq_id] = [
            None if kv is None else tuple(x[:end] for x in kv) for kv in self.sequences[seq_id]
        ]
        self.trees[seq_id] = self.trees[seq_id][: max(0, len(self.trees[seq_id]) - n)]

    def grow_trees(self, seq_ids, append_lengths, parents) -> None:
        """The rows of the step that follows are nodes; `parents` has one for each row."""
        start = 0
        for seq_id, num_rows in zip(seq_ids, append_lengths, strict=True):
            self.trees[seq_id] += [int(p) for p in parents[start : start + num_rows]]
            start += num_rows

    def commit_tree(self, seq_id: int, leaf: int) -> None:
        """Keep the path to a leaf, and of the other nodes nothing."""
        parents, layers = self.trees[seq_id], self.sequences[seq_id]
        for layer, kv in enumerate(layers):
            if kv is not None:
                committed = len(kv[0]) - len(parents)
                kept = [*range(committed), *(committed + n for n in tree_path(parents, leaf))]
                layers[layer] = tuple(x[kept] for x in kv)
        self.trees[seq_id] = []

    def committed_length(self, seq_id: int) -> int:
        """Length without the nodes that are not committed."""
        return self.length(seq_id) - len(self.trees[seq_id])

    def length(self, seq_id: int, layer: int = 0) -> int:
        kv = self.sequences[seq_id][layer]
        return 0 if kv is None else len(kv[0])

    def kv(self, seq_id: int, layer: int) -> tuple[np.ndarray, np.ndarray]:
        """K and V ``[length, Hk, D]`` as the pages hold them."""
        return self.sequences[seq_id][layer]

    def attention(self, layer, seq_ids, append_lengths, qkv, num_kv_heads, sm_scale, sinks=None):
        """Append this step's rows of ``qkv [T, Hq + 2 * Hk, D]`` and attend; returns o, lse."""
        num_qo_heads = qkv.shape[1] - 2 * num_kv_heads
        outputs, lses, start = [], [], 0
        for seq_id, num_rows in zip(seq_ids, append_lengths, strict=True):
            rows = np.asarray(qkv[start : start + num_rows])
            start += num_rows
            held = self.sequences[seq_id][layer]
            total = num_rows + (0 if held is None else len(held[0]))
            all_positions = tree_positions(self.trees[seq_id], total)
            positions = all_positions[total - num_rows :]
            q = rows[:, :num_qo_heads]
            k = rows[:, num_qo_heads : num_qo_heads + num_kv_heads]
            v = rows[:, num_qo_heads + num_kv_heads :]
            if self.mode == "normal":
                end = positions[-1] + 1
                q = rotate(q, positions, self.rope, end).astype(qkv.dtype)
                k = rotate(k, positions, self.rope, end)
            k, v = k.astype(self.kv_dtype), v.astype(self.kv_dtype)
            if held is not None:
                k, v = np.concatenate([held[0], k]), np.concatenate([held[1], v])
            self.sequences[seq_id][layer] = (k, v)
            if self.mode == "inline":
                q = rotate(q, positions, self.rope)
                k = rotate(k, all_positions, self.rope)
            mask = tree_mask(self.trees[seq_id], num_rows, total, self.windows[layer])
            bias = alibi_bias(self.alibi[layer], positions, all_positions)
            o, lse = attention(q, k, v, mask, sm_scale, self.softcap, sinks, bias)
            outputs.append(o)
            lses.append(lse)
        return np.concatenate(outputs), np.concatenate(lses)


class ReferenceLatentCache(ReferenceCache):
    """A cache of MLA layers: per sequence and layer the latent rows."""

    def append(self, layer, seq_ids, append_lengths, latent) -> None:
        """Append this step's rows of ``latent [T, D]``."""
        start = 0
        for seq_id, num_rows in zip(seq_ids, append_lengths, strict=True):
            rows = np.asarray(latent[start : start + num_rows]).astype(self.kv_dtype)
            held = self.sequences[seq_id][layer]
            start += num_rows
            rows = rows if held is None else np.concatenate([held[0], rows])
            self.sequences[seq_id][layer] = (rows,)

    def latent(self, seq_id: int, layer: int) -> np.ndarray:
        """Latent rows ``[length, D]`` as the pages hold them."""
        return self.sequences[seq_id][layer][0]

    def absorbed(self, layer, seq_ids, append_lengths, q, v_head_dim, sm_scale, with_step=True):
        """Absorbed attention after `append`, to all that each row sees or to the past alone."""
        outputs, lses, start = [], [], 0
        for seq_id, num_rows in zip(seq_ids, append_lengths, strict=True):
            latent = self.latent(seq_id, layer)
            mask = tree_mask(self.trees[seq_id], num_rows, len(latent))
            if not with_step:
                mask &= np.arange(len(latent)) < len(latent) - num_rows
            q_rows = q[start : start + num_rows]
            start += num_rows
            o, lse = mla_absorbed(q_rows, latent, v_head_dim, mask, sm_scale)
            outputs.append(o)
            lses.append(lse)
        return np.concatenate(outputs), np.concatenate(lses)

    def non_absorbed(self, layer, seq_ids, append_lengths, q, w_k, w_v, sm_scale):
        """Attention of ``q [T, Hq, Dnope + Dkpe]`` before absorption, to all that each row sees."""
        outputs, lses, start = [], [], 0
        for seq_id, num_rows in zip(seq_ids, append_lengths, strict=True):
            k, v = mla_expand(self.latent(seq_id, layer), w_k, w_v)
            q_rows = q[start : start + num_rows]
            start += num_rows
            mask = tree_mask(self.trees[seq_id], num_rows, len(k))
            o, lse = attention(q_rows, k, v, mask, sm_scale)
            outputs.append(o)
            lses.append(lse)
        return np.concatenate(outputs), np.concatenate(lses)
