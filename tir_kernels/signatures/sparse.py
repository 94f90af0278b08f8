# SPDX-License-Identifier: Apache-2.0
"""The signatures of the kernels that attend to lists, and that choose what they list."""

from __future__ import annotations

from .arguments import Lengths
from .inputs import BoundsInputs, IndexInputs, ListedInputs
from .signature import Signature

_PAGES = "pages", "page_indptr", "page_ids", "lengths"
_OUTPUT = "o", "lse", "sm_scale"

ATTEND_LISTED = Signature(
    ListedInputs,
    ("q", "query_indptr", *_PAGES, "positions", *_OUTPUT, "sink_logits"),
    Lengths.LAST_PAGE,
)
ATTEND_BLOCKS = Signature(
    ListedInputs,
    ("q", "query_indptr", *_PAGES, "blocks", *_OUTPUT, "block_size", "sink_logits"),
    Lengths.LAST_PAGE,
)
INDEX_TOP_K = Signature(
    IndexInputs,
    ("q", "query_indptr", "weights", *_PAGES, "positions", "sm_scale"),
    Lengths.LAST_PAGE,
)
INDEX_TOP_BLOCKS = Signature(
    IndexInputs,
    ("q", "query_indptr", *_PAGES, "blocks", "block_size", "init_blocks", "local_blocks"),
    Lengths.LAST_PAGE,
)
PAGE_BOUNDS = Signature(BoundsInputs, ("pages", "page_ids", "page_lengths", "bounds"))
CHOOSE_PAGES = Signature(
    BoundsInputs, ("q", "bounds", "page_indptr", "page_ids", "blocks"), has_one_row=True
)
