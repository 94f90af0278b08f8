# SPDX-License-Identifier: Apache-2.0
"""The signatures of the attention kernels, as the runtime calls them.

A kernel with a window has it as its last argument but the learned sinks, which come last where a
spec has them.
"""

from __future__ import annotations

from .inputs import FusedInputs, Lengths, PagedInputs, RaggedInputs, SharedInputs
from .signature import Signature

_PAGES = "pages", "page_indptr", "page_ids"
_POSITIONS = "first_positions", "query_positions"
_OUTPUT = "o", "lse"
_ROTATION = "rotary_mode", "rope_scale", "rope_theta"
_TREE = "tree_order_indptr", "tree_order"
_LAST = "window", "sink_logits"

# One row of Q for each sequence, over pages.
DECODE_SLIDING = Signature(
    PagedInputs,
    ("q", *_PAGES, "lengths", *_POSITIONS, *_OUTPUT, *_ROTATION, "sm_scale", *_LAST),
    Lengths.LAST_PAGE,
    has_one_row=True,
)
DECODE = DECODE_SLIDING.without("window", lengths=Lengths.WINDOWS)
DECODE_WINDOWED = DECODE_SLIDING.without("window", lengths=Lengths.MATRIX)

# Any number of rows for each sequence, over pages.
_OF_ROWS = "q", "query_indptr", *_PAGES, "lengths", *_POSITIONS, *_OUTPUT
PREFILL_SPANS_SLIDING = Signature(
    PagedInputs,
    (*_OF_ROWS, "causal", *_ROTATION, "sm_scale", "row_reach", *_LAST),
    Lengths.LAST_PAGE,
)
PREFILL_SPANS = PREFILL_SPANS_SLIDING.without("window", lengths=Lengths.WINDOWS)
PREFILL_SLIDING = PREFILL_SPANS_SLIDING.without("row_reach")
PREFILL = PREFILL_SLIDING.without("window", lengths=Lengths.WINDOWS)
PREFILL_WINDOWED = PREFILL_SLIDING.without("window", lengths=Lengths.MATRIX)
TREE_PAGED_SLIDING = Signature(
    PagedInputs, (*_OF_ROWS, *_ROTATION, "sm_scale", *_TREE, *_LAST), Lengths.LAST_PAGE
)
TREE_PAGED = TREE_PAGED_SLIDING.without("window")

# The latent rows of MLA, which models rotate themselves.
MLA_PREFILL_SLIDING = PREFILL_SLIDING.without(*_POSITIONS, *_ROTATION)
MLA_PREFILL = MLA_PREFILL_SLIDING.without("window")
MLA_TREE_SLIDING = TREE_PAGED_SLIDING.without(*_ROTATION)
MLA_TREE = MLA_TREE_SLIDING.without(*_POSITIONS, "window")

# K and V are ragged arrays.
PREFILL_RAGGED_SLIDING = Signature(
    RaggedInputs,
    (
        *("q", "query_indptr", "k", "v", "kv_indptr", "query_positions", "first_positions"),
        *(*_OUTPUT, "causal", *_ROTATION, "sm_scale", *_LAST),
    ),
)
PREFILL_RAGGED = PREFILL_RAGGED_SLIDING.without("window")
TREE_SLIDING = Signature(
    RaggedInputs,
    (
        *("q", "query_indptr", "k", "v", "kv_indptr", "query_positions", *_TREE, *_OUTPUT),
        *(*_ROTATION, "sm_scale", *_LAST),
    ),
)
TREE = TREE_SLIDING.without("window")

# Pages that the rows of several sequences share.
PREFILL_SHARED = Signature(
    SharedInputs,
    (
        *("q", *_PAGES, "first_positions", "row_indptr", "row_ids", "query_positions", *_OUTPUT),
        *("first_segment", "last_segment", *_ROTATION, "sm_scale"),
    ),
)
MLA_PREFILL_SHARED = PREFILL_SHARED.without(*_POSITIONS, *_ROTATION)

# Fused rows, which are appended first.
APPEND_PREFILL = Signature(
    FusedInputs,
    (
        *("qkv", "query_indptr", "rope_positions", "slots", *_PAGES, "lengths", *_POSITIONS),
        *(*_OUTPUT, "apply_rope", "sm_scale", "sink_logits"),
    ),
    Lengths.WINDOWS,
)
