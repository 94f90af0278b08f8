# SPDX-License-Identifier: Apache-2.0
"""A recurrent layer with a convolution for tier_world.py, whose states tell all tokens before them.

Numbers are integers below 2^24, so float32 keeps them exactly. A state is a hash of the ingredients
up to its position: one that is computed from a wrong state, or from other rows, is a different one.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import tvm

INTERVAL, CONV_WIDTH, ROW_WIDTH = 8, 4, 16
HEAD_DIM = ROW_WIDTH // 2  # of K and of V, which are the ingredients together
RECURRENT = {
    "kind": "recurrent",
    "num_heads": 1,
    "num_key_heads": 1,
    "key_dim": HEAD_DIM,
    "value_dim": HEAD_DIM,
    "decays_by_channel": False,
    "has_beta": False,
    "row_width": ROW_WIDTH,
    "interval": INTERVAL,
    "conv": {"kind": "conv", "channels": ROW_WIDTH, "width": CONV_WIDTH},
}
_FACTORS = np.arange(1, CONV_WIDTH + 1, dtype=np.uint64)[:, None] * np.uint64(977)
_NUM_IN_STATE = HEAD_DIM * HEAD_DIM


def next_state(state: np.ndarray, row: np.ndarray) -> np.ndarray:
    """Return the state behind a token, from that before it and from its ingredients."""
    integers = state.astype(np.uint64) * np.uint64(31) + np.uint64(1)
    mixed = integers + np.resize(row, _NUM_IN_STATE).astype(np.uint64)
    return (mixed & np.uint64(0xFFFFFF)).astype("float32")


def convolve(rows: np.ndarray) -> np.ndarray:
    """Return what `CONV_WIDTH` rows make of the last of them."""
    total = (rows.astype(np.uint64) * _FACTORS).sum(axis=0)
    return (total & np.uint64(0xFFFFFF)).astype("float32")


class RecurrentLayer:
    """The kernels of the layer in NumPy, and the pages that they have seen."""

    def __init__(self) -> None:
        self.ingredients = self.states = self.inputs = np.zeros(0, "float32")

    def run(self, cache: Any, layer: int, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Let the layer append rows; return what convolution and recurrence make of them."""
        count = len(rows)
        convolved = cache.conv(layer, rows, np.zeros((ROW_WIDTH, CONV_WIDTH), "float32"))
        k, v = rows[:, None, :HEAD_DIM], rows[:, None, HEAD_DIM:]
        o = cache.recurrent(layer, k, k, v, np.zeros((count, 1), "float32"))
        return convolved.numpy(), o.numpy()[:, 0]

    def check(self, cache: Any, seq_id: int, rows: np.ndarray, states: np.ndarray) -> int:
        """Compare what the cache keeps of a sequence; return the number of pages.

        Raises
        ------
        RuntimeError
            If something is wrong.
        """
        num_pages = 0
        description = cache.description
        for name, pages in (
            ("recurrent", self.ingredients),
            ("conv", self.inputs),
        ):
            group = description[f"{name}_layers"][0]["group"]
            first, table = cache.first_position(seq_id, group), cache.page_table(seq_id, group)
            kept = pages[table].reshape(-1, ROW_WIDTH)[: len(rows) - first]
            if not np.array_equal(kept, rows[first:]):
                raise RuntimeError(f"{name} has wrong rows at positions from {first} on")
            num_pages += len(table)
        length, first, table = cache._state_table(seq_id, 0)
        for i, page in enumerate(table):
            position = min((first + i + 1) * INTERVAL, length)
            if not np.array_equal(self.states[page].ravel(), states[position - 1]):
                raise RuntimeError(f"the state behind {position} of {len(rows)} tokens is wrong")
        return num_pages + len(table)

    def kernels(self) -> dict[str, Any]:
        """Return the kernels by name."""

        def recurrent_append(k, v, _decay, slots, pages):
            self.ingredients = np.from_dlpack(pages)
            rows = np.concatenate([np.from_dlpack(x)[:, 0] for x in (k, v)], 1)
            self.ingredients.reshape(-1, ROW_WIDTH)[np.from_dlpack(slots)] = rows

        def recurrent_scan(
            _q, _pages, states, segments, row_indptr, slots, rows, reads, writes, o, _scale
        ):
            self.states = np.from_dlpack(states)
            ingredients = self.ingredients.reshape(-1, ROW_WIDTH)
            _, row_indptr, slots, rows, reads, writes, o = (
                np.from_dlpack(x) for x in (segments, row_indptr, slots, rows, reads, writes, o)
            )
            for segment, (read, write) in enumerate(zip(reads, writes, strict=True)):
                state = np.zeros(_NUM_IN_STATE, "float32")
                if read >= 0:
                    state = self.states[read].ravel()
                for i in range(row_indptr[segment], row_indptr[segment + 1]):
                    state = next_state(state, ingredients[slots[i]])
                    if rows[i] >= 0:
                        o[rows[i], 0] = state[:HEAD_DIM]
                self.states[write] = state.reshape(1, HEAD_DIM, HEAD_DIM)

        def row_append(pages, x, slots):
            self.inputs = np.from_dlpack(pages)
            self.inputs.reshape(-1, ROW_WIDTH)[np.from_dlpack(slots)] = np.from_dlpack(x)

        def causal_conv(x, pages, taps, _weight, o):
            inputs, x, o = (np.from_dlpack(each) for each in (pages, x, o))
            inputs = inputs.reshape(-1, ROW_WIDTH)
            for i, slots in enumerate(np.from_dlpack(taps)):
                before = [inputs[slot] if slot >= 0 else np.zeros(ROW_WIDTH) for slot in slots]
                o[i] = convolve(np.stack([*before, x[i]]))

        kernels = (recurrent_append, recurrent_scan, row_append, causal_conv)
        return {kernel.__name__: tvm.runtime.convert(kernel) for kernel in kernels}


def states_of(rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the convolved row and the state behind each of the rows of a text, ``[n, ...]``."""
    state, states = np.zeros(_NUM_IN_STATE, "float32"), []
    for row in rows:
        state = next_state(state, row)
        states.append(state)
    padded = np.concatenate([np.zeros((CONV_WIDTH - 1, ROW_WIDTH), "float32"), rows])
    convolved = [convolve(padded[i : i + CONV_WIDTH]) for i in range(len(rows))]
    return np.array(convolved).reshape(-1, ROW_WIDTH), np.array(states).reshape(-1, _NUM_IN_STATE)
