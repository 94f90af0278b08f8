# SPDX-License-Identifier: Apache-2.0
"""The specification of the cache object: the rows of every sequence, without pages."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from tir_kernels.codec import Codec, CodecPair

from .dense_attention import alibi_bias, attention
from .mla import mla_absorbed, mla_expand
from .quantized import keep
from .rope import Rope, rotate
from .trees import tree_mask, tree_path, tree_positions


class ReferenceCache:
    """The content of a cache: K and V rows per sequence and layer, rounded to the page type.

    It has no pages and no capacity; tests that need those compute them from the lengths. `trees`
    has the parents of the nodes that are not committed, which are a sequence's last rows.

    Parameters
    ----------
    num_layers : int
    kv_dtype : numpy dtype of the pages, or what quantizes their rows: a `Codec`, or a `CodecPair`.
    rope : Rope or None, or one per layer
    mode : {"none", "normal", "inline"}, or one per layer
    windows : one per layer, optional
        Positions that a row sees, its own included; None or 0: all.
    softcap : float, optional
    alibi : one sequence of slopes, or None, per layer, optional
    """

    v_width: int | None = None  # of quantized latent rows: their columns that are V
    static_scales: Sequence[np.ndarray | None] | None = None  # of each layer, [2, Hk]

    def __init__(
        self,
        num_layers: int,
        kv_dtype,
        rope: Rope | Sequence[Rope] | None = None,
        mode: str | Sequence[str] = "none",
        windows: Sequence[int | None] | None = None,
        softcap: float | None = None,
        alibi: Sequence | None = None,
    ):
        self.softcap, self.alibi = softcap, alibi or [None] * num_layers
        self.num_layers, self.kv_dtype = num_layers, kv_dtype
        self.ropes = list(rope) if isinstance(rope, Sequence) else [rope] * num_layers
        self.modes = [mode] * num_layers if isinstance(mode, str) else list(mode)
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

    def kept(self, rows: np.ndarray, is_v: bool = False, layer: int = 0) -> np.ndarray:
        """Rows ``[..., D]`` of K, or of V, as the pages give them back."""
        static = self.static_scales and self.static_scales[layer]
        static = None if static is None else static[int(is_v)]
        if isinstance(self.kv_dtype, (Codec, CodecPair)):
            return keep(self.kv_dtype.v if is_v else self.kv_dtype.k, rows, self.v_width, static)
        return rows.astype(self.kv_dtype)

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
            rope = self.ropes[layer]
            if self.modes[layer] == "normal":
                end = positions[-1] + 1
                q = rotate(q, positions, rope, end).astype(qkv.dtype)
                k = rotate(k, positions, rope, end)
            k, v = self.kept(k, layer=layer), self.kept(v, is_v=True, layer=layer)
            if held is not None:
                k, v = np.concatenate([held[0], k]), np.concatenate([held[1], v])
            self.sequences[seq_id][layer] = (k, v)
            if self.modes[layer] == "inline":
                q = rotate(q, positions, rope)
                k = rotate(k, all_positions, rope)
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
            rows = self.kept(np.asarray(latent[start : start + num_rows]))
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
            mask = tree_mask(self.trees[seq_id], num_rows, len(latent), self.windows[layer])
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
            mask = tree_mask(self.trees[seq_id], num_rows, len(k), self.windows[layer])
            o, lse = attention(q_rows, k, v, mask, sm_scale)
            outputs.append(o)
            lses.append(lse)
        return np.concatenate(outputs), np.concatenate(lses)
