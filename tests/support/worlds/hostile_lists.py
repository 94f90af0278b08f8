# SPDX-License-Identifier: Apache-2.0
"""Kinds of arguments of the functions of lists and of index lanes, and these functions."""

from __future__ import annotations

from .hostile_values import (
    LANE,
    MHA,
    MLA,
    NO_SINKS,
    OUT,
    OUT_LSE,
    QKV,
    ROWS,
    SCALE,
    Kind,
    Q,
    integer,
    tensor,
)

LISTED, LANE_LAYER = integer(MHA, LANE, -1, 4), integer(LANE, MHA, MLA, -1, 4)
LISTS = tensor(ROWS, 3, dtype="int32", free_axis=1, is_read=True)
BLOCK_LISTS = tensor(ROWS, 2, 1, dtype="int32", free_axis=1, is_read=True)
del BLOCK_LISTS.wrong["axis_2_-1"]  # lists may be empty
BLOCK_SIZE = integer(8, 0, -4, 1, 6, 2**20 + 4, 2**31)
INDEX_Q, WEIGHTS = tensor(ROWS, 3, 8, is_read=True), tensor(ROWS, 3, is_read=True)
CHOSEN = tensor(ROWS, 3, dtype="int32", free_axis=1)
CHOSEN_BLOCKS = tensor(ROWS, 3, 4, dtype="int32", free_axis=2)
KEPT = integer(1, -1, 5, 2**31)
BUDGET = integer(8, 0, -8, 7, 2**31)

# Names without "pagedkv."; the values are those of `FUNCTIONS` in test_hostile_arguments.py.
LIST_FUNCTIONS: dict[str, tuple[str, list[Kind]]] = {
    "attention_to_positions": ("lists", [LISTED, SCALE, QKV, LISTS, NO_SINKS, OUT]),
    "cross_attention_to_positions": (
        "lists", [LISTED, SCALE, Q, LISTS, OUT, OUT_LSE, NO_SINKS],
    ),
    "attention_to_blocks": (
        "lists", [LISTED, BLOCK_SIZE, SCALE, QKV, BLOCK_LISTS, NO_SINKS, OUT],
    ),
    "cross_attention_to_blocks": (
        "lists", [LISTED, BLOCK_SIZE, SCALE, Q, BLOCK_LISTS, OUT, OUT_LSE, NO_SINKS],
    ),
    "attention_within_budget": ("lists", [LISTED, BUDGET, SCALE, QKV, NO_SINKS, OUT]),
    "index_top_k": ("lists", [LANE_LAYER, SCALE, INDEX_Q, WEIGHTS, CHOSEN]),
    "index_top_blocks": ("lists", [LANE_LAYER, BLOCK_SIZE, KEPT, KEPT, INDEX_Q, CHOSEN_BLOCKS]),
}  # fmt: skip
