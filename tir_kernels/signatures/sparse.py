# SPDX-License-Identifier: Apache-2.0
"""The arguments and the signatures of attention to lists, and of what chooses these."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from .inputs import ROWS, Lengths, PagedInputs, array, scalar
from .signature import Signature


@dataclass(frozen=True, kw_only=True)
class ListedInputs(PagedInputs):
    """Rows attend to lists of W positions or blocks of positions; negative ones are left out."""

    # Columns of the row's sequence.
    positions: Any = array("[T, W]", "int32")
    # Blocks of `block_size` positions: C lists, each of which is for some KV heads.
    blocks: Any = array("[T, C, W]", "int32")
    block_size: Any = scalar("int32")


@dataclass(frozen=True, kw_only=True)
class IndexInputs(PagedInputs):
    """Rows choose W positions or blocks of positions by index keys, which lie in pages."""

    # Weights of the heads.
    weights: Any = array("[T, Hq]", "float32")
    # Written: what is chosen, then -1.
    positions: Any = array("[T, W]", "int32")
    blocks: Any = array("[T, Hq, W]", "int32")
    block_size: Any = scalar("int32")
    # Blocks that are chosen anyway: the first and the last ones that a row sees.
    init_blocks: Any = scalar("int32")
    local_blocks: Any = scalar("int32")


@dataclass(frozen=True, kw_only=True)
class BoundsInputs(PagedInputs):
    """Bounds of the rows of K in pages, and the W pages that KV heads choose by them."""

    # Slots of each page that hold something.
    page_lengths: Any = array("[N]", "int32")
    # Maxima, then minima, of the columns of K in a page.
    bounds: Any = array("[P, Hk, 2 Dqk]", ROWS)
    # Written: pages by their number in the sequence, then -1.
    blocks: Any = array("[T, Hk, W]", "int32")


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
