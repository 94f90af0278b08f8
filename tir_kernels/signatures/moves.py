# SPDX-License-Identifier: Apache-2.0
"""The arguments and the signatures of the kernels that move rows, and that merge partial states."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from .inputs import PAGES, ROWS, array, scalar
from .signature import Signature


def _is_longrope(spec) -> bool:
    return spec.rope.kind == "longrope"


@dataclass(frozen=True, kw_only=True)
class AppendInputs:
    """The rows of a step, and the slots that they go to."""

    pages: Any = array("pages", PAGES)
    # Fused rows: ``[Hq + 2 Hk, D]``; with two widths ``[Hq Dqk + Hk (Dqk + Dv)]``.
    qkv: Any = array("[T, fused]", ROWS)
    # CSR offsets: the rows of each sequence.
    query_indptr: Any = array("[B + 1]", "int32")
    # The position by which Q and K of a row are rotated.
    rope_positions: Any = array("[T]", "int32")
    # The slot of a row; a negative one: do not write.
    slots: Any = array("[T]", "int32")
    q: Any = array("[T, Hq, Dqk]", ROWS)
    k: Any = array("[T, Hk, Dqk]", ROWS)
    v: Any = array("[T, Hk, Dv]", ROWS)
    # Latent rows.
    kv: Any = array("[T, Dqk]", ROWS)
    # 0: Q and K stay as they are.
    apply_rope: Any = scalar("int64")
    # The long factors, then the short ones.
    ext_factors: Any = array("[rotary_dim]", "float32", needs=_is_longrope)
    # Static scales of K and of V.
    kv_scales: Any = array("[2, Hk]", "float32", needs=lambda spec: spec.static_scales)


@dataclass(frozen=True, kw_only=True)
class SplitInputs(AppendInputs):
    """As `AppendInputs`; with longrope the kernel rotates in any case."""

    apply_rope: Any = scalar("int64", needs=lambda spec: not _is_longrope(spec))


TRANSPOSE_APPEND = Signature(
    AppendInputs, ("pages", "k", "v", "slots", "kv_scales"), count_dtype="int64"
)
TRANSPOSE_APPEND_MLA = Signature(AppendInputs, ("pages", "kv", "slots"), count_dtype="int64")
SPLIT_ROTARY = Signature(
    SplitInputs,
    ("qkv", "rope_positions", "q", "k", "v", "apply_rope", "ext_factors"),
    count_dtype="int64",
)
ROPE_APPEND = Signature(
    AppendInputs,
    (
        *("qkv", "query_indptr", "rope_positions", "slots", "q", "pages", "apply_rope"),
        *("ext_factors", "kv_scales"),
    ),
    count_dtype="int64",
)


@dataclass(frozen=True, kw_only=True)
class CopyInputs:
    """What is copied: slots of a page, of many pages, or slots in order."""

    pages: Any = array("pages", PAGES)
    # Pages, and the number of their first slots that are copied.
    source: Any = scalar("int64")
    destination: Any = scalar("int64")
    length: Any = scalar("int64")
    # Of each copy the source page, the destination page and the number of slots.
    copies: Any = array("[3, num_copies]", "int32")
    # CSR offsets of the copies of each sequence; those from the first one on are made.
    length_indptr: Any = array("[B + 1]", "int32")
    # Of each copy the source slot and the destination slot.
    src_dst_slots: Any = array("[2, num_copies]", "int32")
    batch_size: Any = scalar("int32")


COPY_SINGLE_PAGE = Signature(
    CopyInputs, ("pages", "source", "destination", "length"), count_dtype="int64"
)
COPY_PAGES = Signature(CopyInputs, ("pages", "copies"), count_dtype="int64")
COMPACT_COPY = Signature(
    CopyInputs, ("pages", "length_indptr", "src_dst_slots", "batch_size"), count_dtype="int64"
)


@dataclass(frozen=True, kw_only=True)
class ReadInputs:
    """Rows that are read back out of the pages of a layer, one of those of the arrays."""

    pages: Any = array("pages", PAGES)
    # A negative slot: leave the row.
    slots: Any = array("[T]", "int32")
    k: Any = array("[num_layers, T, Hk, Dqk]", "row_dtype")
    v: Any = array("[num_layers, T, Hk, Dv]", "row_dtype")
    # Latent rows.
    kv: Any = array("[num_layers, T, Dqk]", "row_dtype")
    layer: Any = scalar("int64")


DEBUG_GET_KV = Signature(ReadInputs, ("pages", "slots", "k", "v", "layer"), count_dtype="int64")
DEBUG_GET_KV_MLA = Signature(ReadInputs, ("pages", "slots", "kv", "layer"), count_dtype="int64")


@dataclass(frozen=True, kw_only=True)
class StateInputs:
    """Partial states: the first one is changed in place."""

    o: Any = array("[T, Hq, Dv]", ROWS)
    # Base-2 logs of sums of exponentials.
    lse: Any = array("[T, Hq]", "float32")
    o_other: Any = array("[T, Hq, Dv]", ROWS)
    lse_other: Any = array("[T, Hq]", "float32")
    # Natural logits; -inf: none.
    sink_logits: Any = array("[Hq]", "float32")


MERGE = Signature(StateInputs, ("o", "lse", "o_other", "lse_other"), count_dtype="int64")
APPLY_SINKS = Signature(StateInputs, ("o", "lse", "sink_logits"), count_dtype="int64")
