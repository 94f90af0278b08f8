# SPDX-License-Identifier: Apache-2.0
"""The specification of windows of sequences: what a row sees, and where its rotation counts from.

A sequence with a window of `size` positions, `sinks` of them its first ones, holds these and its
last ``size - sinks`` between steps. A row sees the sinks, the ``size - sinks`` positions before it,
and itself, in any chunking. If the window includes the row itself, one position less is held, and
the row sees `size` positions. Without a word from the caller it does so if a layer has mode
"normal".

In mode "inline" what a row sees is numbered from 0, so rotations stay within the window. In modes
"normal" and "none" Q and K are rotated by their positions in the whole text.
Layers with a window of their own follow that one alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from . import ReferenceCache, alibi_bias, attention, gather_slots, rotate, sequence_slots


@dataclass
class Window:
    """The window of one sequence; `dropped` positions are missing behind its sinks."""

    size: int = 0  # 0: everything
    sinks: int = 0
    dropped: int = 0
    includes_self: bool = False  # whether a row is one of the `size` positions that it sees

    @property
    def num_held(self) -> int:
        """Positions between steps."""
        return self.size - self.includes_self


def visible(window: Window, row: int) -> np.ndarray:
    """Positions of the text that the row at text position `row` sees; the last is its own."""
    text = np.arange(row + 1)
    kept = (text < window.sinks) | (text >= window.sinks + window.dropped)
    if window.size:
        back = int(window.num_held) - int(window.sinks)
        kept &= (text < window.sinks) | (text >= int(row) - back)
    return text[kept]


def attend(
    q, k, v, seen: Sequence[np.ndarray], positions, rope, sm_scale, softcap=None, sinks=None,
    slopes=None, first=0,
):  # fmt: skip
    """Attention of ``q [T, Hq, D]`` where row t sees the rows ``seen[t]`` of ``k, v [S, Hk, D]``.

    What it sees has the positions `first` and so on, and the row has ``positions[t]``: for a
    rotation, and for ALiBi where there are `slopes`.
    """
    outputs, lses = [], []
    for t, columns in enumerate(seen):
        columns = columns[columns < len(k)]
        q_row, k_rows = q[t : t + 1], k[columns]
        k_positions = first + np.arange(len(columns))
        if rope is not None:
            q_row = rotate(q_row, positions[t : t + 1], rope)
            k_rows = rotate(k_rows, k_positions, rope)
        mask = np.ones((1, len(columns)), bool)
        bias = alibi_bias(slopes, positions[t : t + 1], k_positions)
        o, lse = attention(q_row, k_rows, v[columns], mask, sm_scale, softcap, sinks, bias)
        outputs.append(o)
        lses.append(lse)
    return np.concatenate(outputs), np.concatenate(lses)


def paged_attention(
    q, query_indptr, pages, page_indptr, page_ids, length_rows, sm_scale,
    *, causal=True, inline=None, softcap=None, alibi=None,
):  # fmt: skip
    """Attention of a batch over its pages, with windows of sequences.

    Parameters
    ----------
    length_rows : int ``[4, B]`` or ``[3, B]``
        Slots in use of the last page; the slot at which what was not dropped begins behind the
        sinks; the number of sinks; the positions that a row sees besides the sinks and itself
        (without it: all).
    causal : bool
        Whether the rows are the last slots of the pages, or follow them.
    inline : tuple (Rope, query_positions ``[T]``, first_positions ``[B]``), optional
        Rotate Q and K here. Rows of a chunk that is longer than the window are numbered through;
        each stands behind what it sees, so at most at the size of the window.
    alibi : tuple (slopes, query_positions ``[T]``, first_positions ``[B]``), optional
    others : as `reference.paged_attention`
    """
    nowhere = None, np.zeros(len(q), int), np.zeros(len(query_indptr) - 1, int)
    rope, q_positions, k_offsets = inline or nowhere
    if alibi is not None:
        slopes, q_positions, k_offsets = alibi
    else:
        slopes = None
    outputs, lses = [], []
    last, begins, sinks = length_rows[:3]
    for b in range(len(query_indptr) - 1):
        rows = slice(query_indptr[b], query_indptr[b + 1])
        ids = page_ids[page_indptr[b] : page_indptr[b + 1]]
        k, v = gather_slots(pages, sequence_slots(ids, last[b], pages.shape[3]))
        num_rows, num_slots = rows.stop - rows.start, len(k)
        most = int(length_rows[3][b]) if len(length_rows) == 4 else 2**30
        window = Window(most + int(sinks[b]), int(sinks[b]), int(begins[b] - sinks[b]))
        first = num_slots - (num_rows if causal else 0)
        seen = [visible(window, first + r) for r in range(num_rows)]
        positions = np.minimum(q_positions[rows], window.size)
        arguments = q[rows], k, v, seen, positions, rope, sm_scale, softcap
        o, lse = attend(*arguments, slopes=slopes, first=k_offsets[b])
        outputs.append(o)
        lses.append(lse)
    return np.concatenate(outputs), np.concatenate(lses)


class WindowedReferenceCache(ReferenceCache):
    """A `ReferenceCache` whose sequences may have windows; it keeps the rows of the whole text.

    Parameters
    ----------
    includes_self : bool, optional
        Whether a row is one of the positions of its window. By default where a layer has mode
        "normal".
    slides_within_step : bool
        False for the calling convention of apache-tvm, whose kernels get one window per sequence
        and step: every row sees what the first row of the step sees, and the rows of the step up
        to its own.
    """

    def __init__(
        self, *args, includes_self: bool | None = None, slides_within_step: bool = True, **kwargs
    ):
        super().__init__(*args, **kwargs)
        self.includes_self = "normal" in self.modes if includes_self is None else includes_self
        self.slides_within_step = slides_within_step
        self.of: dict[int, Window] = {}

    def add_sequence(self, seq_id: int) -> None:
        super().add_sequence(seq_id)
        self.of[seq_id] = Window()

    def remove_sequence(self, seq_id: int) -> None:
        super().remove_sequence(seq_id)
        del self.of[seq_id]

    def enable_window(self, seq_id: int, size: int, sinks: int) -> None:
        window = self.of[seq_id]
        window.size, window.sinks, window.includes_self = size, sinks, self.includes_self
        self.end_step([seq_id])

    def end_step(self, seq_ids) -> None:
        """Drop what has left the windows."""
        for seq_id in seq_ids:
            window = self.of[seq_id]
            if window.size:
                window.dropped += max(0, self.length(seq_id) - window.num_held)

    def length(self, seq_id: int, layer: int = 0) -> int:
        """Positions that the sequence holds."""
        return super().length(seq_id, layer) - self.of[seq_id].dropped

    def text_position(self, seq_id: int, position: int) -> int:
        window = self.of[seq_id]
        return position + (window.dropped if position >= window.sinks else 0)

    def text_length(self, seq_id: int, length: int) -> int:
        """Positions of the text up to the end of the first `length` that are held."""
        return length if length <= self.of[seq_id].sinks else length + self.of[seq_id].dropped

    def fork_sequence(self, parent_id: int, child_id: int, fork_pos: int = -1) -> None:
        length = self.length(parent_id) if fork_pos == -1 else fork_pos
        parent = self.of[parent_id]
        super().fork_sequence(parent_id, child_id, self.text_length(parent_id, length))
        keeps_gap = parent.dropped > 0 and length > parent.sinks
        self.of[child_id] = Window(0, parent.sinks, parent.dropped) if keeps_gap else Window()

    def pop_n(self, seq_id: int, n: int) -> None:
        window, length = self.of[seq_id], self.length(seq_id) - n
        end = self.text_length(seq_id, length)
        self.sequences[seq_id] = [
            None if kv is None else tuple(x[:end] for x in kv) for kv in self.sequences[seq_id]
        ]
        self.trees[seq_id] = self.trees[seq_id][: max(0, len(self.trees[seq_id]) - n)]
        if length <= window.sinks:
            window.dropped = 0
            window.sinks = window.sinks if window.size else 0

    def kv(self, seq_id: int, layer: int):
        """K and V of the positions that the sequence holds."""
        window = self.of[seq_id]
        return tuple(
            np.concatenate([x[: window.sinks], x[window.sinks + window.dropped :]])
            for x in self.sequences[seq_id][layer]
        )

    def seen(self, seq_id: int, start: int, row: int) -> np.ndarray:
        """Positions of the text that a row sees in a step whose first row is `start`."""
        if self.slides_within_step:
            return visible(self.of[seq_id], row)
        return np.concatenate([visible(self.of[seq_id], start), np.arange(start + 1, row + 1)])

    def attention(self, layer, seq_ids, append_lengths, qkv, num_kv_heads, sm_scale, sinks=None):
        starts = [super(WindowedReferenceCache, self).length(i, layer) for i in seq_ids]
        whole = super().attention(
            layer, seq_ids, append_lengths, qkv, num_kv_heads, sm_scale, sinks
        )
        if self.windows[layer]:
            return whole
        num_qo_heads = qkv.shape[1] - 2 * num_kv_heads
        rope = (
            self.ropes[layer] if self.modes[layer] == "inline" else None
        )  # else K was rotated when it came
        outputs, lses, first = [], [], 0
        for seq_id, num_rows, start in zip(seq_ids, append_lengths, starts, strict=True):
            q = qkv[first : first + num_rows, :num_qo_heads]
            if self.modes[layer] == "normal":
                text, end = start + np.arange(num_rows), start + num_rows
                q = rotate(q, text, self.ropes[layer], end).astype(qkv.dtype)
            k, v = self.sequences[seq_id][layer]
            seen = [self.seen(seq_id, start, row) for row in range(start, start + num_rows)]
            positions = np.array([len(columns) - 1 for columns in seen])
            extras = (self.softcap, sinks, self.alibi[layer])
            o, lse = attend(q, k, v, seen, positions, rope, sm_scale, *extras)
            is_plain = self.of[seq_id] == Window()  # then also with mode "normal"
            rows = slice(first, first + num_rows)
            outputs.append(whole[0][rows] if is_plain else o)
            lses.append(whole[1][rows] if is_plain else lse)
            first += num_rows
        return np.concatenate(outputs), np.concatenate(lses)
