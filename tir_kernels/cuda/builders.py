# SPDX-License-Identifier: Apache-2.0
"""Kernel name -> builder, of the kernels that GPUs have to themselves."""

from __future__ import annotations

from collections.abc import Callable

from .attention import decode, prefill, shared

BUILDERS: dict[str, Callable] = {
    "prefill_ragged": prefill.prefill_ragged,
    "prefill": prefill.prefill,
    "decode": decode.decode,
    "decode_windowed": decode.decode_windowed,
    "decode_sliding": decode.decode_sliding,
    "prefill_windowed": prefill.prefill_windowed,
    "prefill_sliding": prefill.prefill_sliding,
    "prefill_ragged_sliding": prefill.prefill_ragged_sliding,
    "prefill_spans": prefill.prefill_spans,
    "prefill_spans_sliding": prefill.prefill_spans_sliding,
    "prefill_shared": shared.prefill_shared,
    "tree_paged": prefill.tree_paged,
    "tree_paged_sliding": prefill.tree_paged_sliding,
    "tree": prefill.tree,
    "tree_sliding": prefill.tree_sliding,
    "mla_prefill": prefill.mla_prefill,
    "mla_prefill_sliding": prefill.mla_prefill_sliding,
    "mla_prefill_shared": shared.mla_prefill_shared,
    "mla_tree": prefill.mla_tree,
    "mla_tree_sliding": prefill.mla_tree_sliding,
}
