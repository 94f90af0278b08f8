# SPDX-License-Identifier: Apache-2.0
"""The arguments and the signatures of the kernels of recurrent layers and convolutions.

In shapes, H and Hk are heads of v and of k, Dk and Dv columns of k and v.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from .inputs import PAGES, ROWS, array, scalar
from .signature import Signature


def pages_of_ingredients() -> Any:
    """Declare the pool of a layer, whose rows have float32 numbers as well."""
    return array("[P, page_size, row_width]", ROWS, min_align=4)


@dataclass(frozen=True, kw_only=True)
class IngredientInputs:
    """The ingredients of tokens, and the slots that they go to."""

    k: Any = array("[T, Hk, Dk]", ROWS)
    v: Any = array("[T, H, Dv]", ROWS)
    # ``[H]``, with a decay for each channel ``[H, Dk]``.
    log_decay: Any = array("[T, gates]", "gate_dtype")
    beta: Any = array("[T, H]", "gate_dtype", needs=lambda spec: spec.is_delta)
    # A negative slot: do not write.
    slots: Any = array("[T]", "int32")
    pages: Any = pages_of_ingredients()


RECURRENT_APPEND = Signature(
    IngredientInputs, ("k", "v", "log_decay", "beta", "slots", "pages"), count_dtype="int64"
)


@dataclass(frozen=True, kw_only=True)
class ScanInputs:
    """Sequences of segments of tokens, whose ingredients lie in pages; see `recurrent_scan`."""

    q: Any = array("[T, Hk, Dk]", ROWS)
    pages: Any = pages_of_ingredients()
    states: Any = array("[num_states, H, Dk, Dv]", "state_dtype")
    # CSR offsets: segments of sequences, and tokens of segments.
    segment_indptr: Any = array("[B + 1]", "int32")
    row_indptr: Any = array("[num_segments + 1]", "int32")
    # Of each token the slot of its ingredients, and its row of q and o; -1: none.
    slots: Any = array("[num_tokens]", "int32")
    rows: Any = array("[num_tokens]", "int32")
    # Of each segment the state that it begins with, -1: zeros; and where it leaves its last one.
    read_pages: Any = array("[num_segments]", "int32")
    write_pages: Any = array("[num_segments]", "int32")
    # Written.
    o: Any = array("[T, H, Dv]", ROWS)
    # Factor on q.
    scale: Any = scalar("float32")


RECURRENT_SCAN = Signature(
    ScanInputs,
    (
        *("q", "pages", "states", "segment_indptr", "row_indptr", "slots", "rows"),
        *("read_pages", "write_pages", "o", "scale"),
    ),
)


@dataclass(frozen=True, kw_only=True)
class ConvInputs:
    """Rows of a causal convolution, and the rows before them, which lie in pages."""

    x: Any = array("[T, channels]", ROWS)
    pages: Any = array("pages", PAGES)
    # The slots of the rows before each row; -1: zeros.
    tap_slots: Any = array("[T, width - 1]", "int32")
    weight: Any = array("[channels, width]", ROWS)
    bias: Any = array("[channels]", ROWS, needs=lambda spec: spec.has_bias)
    # Written.
    out: Any = array("[T, channels]", ROWS)


CAUSAL_CONV = Signature(
    ConvInputs, ("x", "pages", "tap_slots", "weight", "bias", "out"), count_dtype="int64"
)
